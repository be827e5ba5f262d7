"""Shared code of the benchmarks: the work, hand-written loops, timing."""
