"""Packed batches and what is done to them: validation, micro-batches, shards, padding."""
