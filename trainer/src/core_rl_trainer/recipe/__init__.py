"""Recipes: the config of a training run."""
