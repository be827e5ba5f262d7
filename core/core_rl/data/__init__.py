"""Packed batches and their validation, micro-batches, shards, padding."""
