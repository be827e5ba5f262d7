"""Outputs of a run: models and adapters of its checkpoints, and a repository on the Hugging Face Hub."""
