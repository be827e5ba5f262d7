"""Checkpoints: atomic directories with manifests, formats for engines, and the checkpoint of a whole run."""
