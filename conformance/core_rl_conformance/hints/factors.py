"""Which number something was multiplied by, and what that number may be."""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor

from core_rl_oracle.tolerance import Tolerance

__all__ = ["constant_factor", "show_factor"]

LARGEST_PART = 64
"""Fractions are recognized up to this numerator and denominator."""
PLAUSIBLE_PART = 8
"""Larger parts must be powers of two: nobody divides by 35 or multiplies by 38."""


def show_factor(factor: float) -> str:
    """``factor`` as a number, and as the fraction or square root that it is near: ``0.5 (1/2)``."""
    plain, square = _fraction(factor), _fraction(factor * factor)
    if plain is not None:
        return f"{factor:.6g}" if plain.denominator == 1 else f"{factor:.6g} ({plain})"
    return f"{factor:.6g} (sqrt({square}))" if square is not None and factor > 0 else f"{factor:.6g}"


def _fraction(value: float) -> Fraction | None:
    """The fraction of small numbers that ``value`` is, up to one part in 10,000."""
    if not math.isfinite(value) or not value:
        return None
    near = Fraction(value).limit_denominator(LARGEST_PART)
    plausible = near != 0 and all(_plausible(part) for part in (abs(near.numerator), near.denominator))
    return near if plausible and abs(float(near) / value - 1) <= 1e-4 else None


def _plausible(part: int) -> bool:
    return part <= PLAUSIBLE_PART or (part <= LARGEST_PART and part.bit_count() == 1)


def constant_factor(got: Tensor, expected: Tensor, tolerance: Tolerance) -> float | None:
    """The number that all of ``expected`` was multiplied by (up to 0.1 %), if there is one other than 1.

    It must explain every entry, the ones that are nearly 0 included.
    """
    got, expected = got.detach().double().flatten(), expected.detach().double().flatten()
    if got.numel() < 2 or not bool(torch.isfinite(got).all()):
        return None
    large = expected.abs() > max(100 * tolerance.limit, 1e-3 * float(expected.abs().max()))
    if int(large.sum()) < 2:
        return None
    factor = float((got[large] / expected[large]).median())
    if not factor or abs(factor - 1) <= 1e-6:
        return None
    allowed = 1e-3 * abs(factor) * expected.abs() + max(1.0, abs(factor)) * tolerance.limit
    return factor if bool(((got - factor * expected).abs() <= allowed).all()) else None
