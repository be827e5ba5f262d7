"""A plain trainer, and mutants of it."""
