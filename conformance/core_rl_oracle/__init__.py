"""Float64 oracle, the plain model's errors, and the tolerance that follows. Imports nothing of core-rl."""
