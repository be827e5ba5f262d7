"""Tolerance of moments of 8 bits from their exact values.

The dynamic data type of Dettmers et al. (arXiv:2110.02861, section 2.2) divides each block by its largest magnitude.
Its codes are widest apart in the last decade, from 0.1 to 1: that has 64 of them for numbers with a sign, and 128 for
others. A number is at most half of their distance from its code.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from core_rl_oracle.tolerance import FLOOR_ULPS, Tolerance

__all__ = ["LARGEST_ERROR", "share_of_values", "with_rounding_to_codes"]

LARGEST_ERROR = {"exp_avg": 0.9 / 64 / 2, "exp_avg_sq": 0.9 / 128 / 2}
"""Error of each kind of moments, in relation to the largest magnitude of the block."""


def with_rounding_to_codes(
    kind: str, exact: Mapping[str, Tensor], allowed: Mapping[str, Tolerance]
) -> dict[str, Tolerance]:
    """``allowed``, and the largest error of codes for ``exact``; which block an element is in is up to an engine."""
    # A number halfway between two codes is as far as that, and rounds in float32.
    share = LARGEST_ERROR[kind] + FLOOR_ULPS * torch.finfo(torch.float32).eps
    return {
        name: allowed[name] + Tolerance(baseline=0.0, floor=share * float(value.abs().max()))
        for name, value in exact.items()
    }


def share_of_values(moment: Tensor) -> float:
    """Different values for each element that is not 0: near 1 in float32; codes repeat in each block."""
    values = moment[moment != 0]
    return len(values.unique()) / max(1, len(values))
