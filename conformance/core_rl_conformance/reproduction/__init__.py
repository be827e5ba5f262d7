"""Reproductions of failures: scripts in plain torch and transformers that compute the expected values again."""
