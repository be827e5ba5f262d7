"""Numerical kernels that engines share."""
