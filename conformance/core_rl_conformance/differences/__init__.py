"""Differences between two trainers: the terms of each one's loss, read from its gradients."""
