"""The recipe: the config of a run."""
