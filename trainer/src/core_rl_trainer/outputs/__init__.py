"""What a run hands on: models and adapters of its checkpoints, and a repository on the Hugging Face Hub."""
