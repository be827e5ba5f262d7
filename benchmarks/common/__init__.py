"""What the benchmarks share: the work, hand-written loops, timing."""
