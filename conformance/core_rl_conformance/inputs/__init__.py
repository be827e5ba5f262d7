"""Inputs of checks: tiny models, ragged batches, losses."""
