"""A run of a plan: engines, loop, records and checkpoints."""
