"""The tolerance of an engine against the oracle: one rule, with no number tuned for an engine.

``error(engine, oracle) <= 4 * baseline + floor``. The baseline is the largest error that the plain
Hugging Face model in the engine's dtype makes over several equivalent variants (`plain`): a single
one can be luckily tiny. The floor is some units in the last place of the largest entry of that kind,
because some true values are zero. Tensors are compared by their largest difference.

An error that is small at each token and too large on the whole is a bug too, see `mean_square`. So is an error that
always points the same way, see `signed_mean`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import torch
from torch import Tensor

FACTOR = 4.0
"""An engine may be this much worse than the worst variant of the plain model."""
FLOOR_ULPS = 4.0
"""Units in the last place, of the largest entry of that kind, that are free."""
SIGMAS = 4.0
"""Standard errors by which a mean error may differ from zero."""


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """The largest error that passes, and where it comes from."""

    baseline: float
    floor: float

    @property
    def limit(self) -> float:
        """The largest error that passes."""
        return FACTOR * self.baseline + self.floor

    def allows(self, error: float) -> bool:
        """Whether ``error`` passes; NaN never does."""
        return error <= self.limit

    def __add__(self, other: Tolerance) -> Tolerance:
        """The allowed difference of two engines that have their own tolerances."""
        return Tolerance(baseline=self.baseline + other.baseline, floor=self.floor + other.floor)

    def times(self, factor: float) -> Tolerance:
        """Of a value times ``factor``, which is positive."""
        return Tolerance(baseline=self.baseline * factor, floor=self.floor * factor)

    def __str__(self) -> str:
        return f"{self.limit:.1e} (= {FACTOR:g} x {self.baseline:.1e} of the plain model + {self.floor:.1e})"


EXACT = Tolerance(baseline=0.0, floor=0.0)


def largest_difference(got: Tensor, expected: Tensor) -> float:
    """The infinity norm of the difference, in float64; infinite where ``got`` is NaN."""
    if not got.numel():
        return 0.0
    difference = (got.detach().double() - expected.detach().double()).abs()
    return float(torch.nan_to_num(difference, nan=math.inf).max())


def tolerance(variants: Sequence[Tensor], expected: Tensor, dtype: torch.dtype) -> Tolerance:
    """The tolerance of one tensor from the plain model's ``variants`` of it."""
    return tolerances([{"": value} for value in variants], {"": expected}, dtype)[""]


def scalar_tolerance(variants: Sequence[float], expected: float, dtype: torch.dtype) -> Tolerance:
    """The tolerance of a number."""
    values = [torch.tensor(value, dtype=torch.float64) for value in (*variants, expected)]
    return tolerance(values[:-1], values[-1], dtype)


def tolerances(
    variants: Iterable[Mapping[str, Tensor]], expected: Mapping[str, Tensor], dtype: torch.dtype
) -> dict[str, Tolerance]:
    """The tolerance of each tensor of one kind (all gradients, all weights); they share the floor.

    ``variants`` are read one at a time: each may be as large as the model.
    """
    largest = max((float(value.abs().max()) for value in expected.values() if value.numel()), default=0.0)
    floor = FLOOR_ULPS * torch.finfo(dtype).eps * largest
    baselines = dict.fromkeys(expected, 0.0)
    for variant in variants:
        for name, value in expected.items():
            baselines[name] = max(baselines[name], largest_difference(variant[name], value))
    return {name: Tolerance(baseline=baseline, floor=floor) for name, baseline in baselines.items()}


def signed_mean(
    errors: Sequence[Tensor], plain_errors: Sequence[Sequence[Tensor]], floor: float
) -> tuple[float, float]:
    """The mean of ``errors``, one tensor of token errors for each sequence, and how far from 0 chance may take it.

    It may be 4 times the largest signed mean of the plain model's variants plus 4 standard errors over
    sequences. The deviation is the larger of the engine's and the plain model's: an engine with
    hardly any error must not be judged by its own luck. ``floor`` is free for a single token; in a mean over
    ``n`` tokens, roundings that are independent leave a part in ``sqrt(n)`` of it.
    """
    ours, plain = _means(errors), [_means(variant) for variant in plain_errors]
    deviation = max(_deviation(ours), *(_deviation(variant) for variant in plain))
    limit = FACTOR * max(abs(fmean(variant)) for variant in plain) + SIGMAS * deviation / math.sqrt(len(ours))
    count = max(1, sum(error.numel() for error in errors))
    return fmean(ours), limit + floor / math.sqrt(count)


def mean_square(
    errors: Sequence[Tensor], plain_errors: Sequence[Sequence[Tensor]], floor: float
) -> tuple[float, Tolerance]:
    """The root mean square of ``errors``, and the tolerance for the whole of many tokens.

    That is 4 times the largest root mean square error of the plain model's variants. The largest of many errors
    is ruled by its tail, above all in bfloat16; their mean square hardly differs between equivalent computations,
    so that this sees a tenth of an error hidden by the largest. Of the floor of a single token, independent
    roundings leave a part in ``sqrt(n)``.
    """
    count = max(1, sum(error.numel() for error in errors))
    baseline = max(_root_mean_square(variant) for variant in plain_errors)
    allowed = Tolerance(baseline=baseline, floor=floor / math.sqrt(count))
    return _root_mean_square(errors), allowed


def _root_mean_square(errors: Sequence[Tensor]) -> float:
    return float(torch.cat([error.double().reshape(-1) for error in errors]).square().mean().sqrt())


def _means(errors: Sequence[Tensor]) -> list[float]:
    return [float(error.double().mean()) for error in errors if error.numel()]


def _deviation(values: Sequence[float]) -> float:
    return stdev(values) if len(values) > 1 else 0.0
