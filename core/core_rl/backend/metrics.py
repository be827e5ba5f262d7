"""Metrics that know how to be reduced over micro-batches and ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from core_rl.errors import LossError

Reduction = Literal["mean", "sum", "max", "min"]


@dataclass(frozen=True, slots=True)
class Metric:
    """A partial value of a metric; build it with the four constructors."""

    reduction: Reduction
    value: float | Tensor
    count: float | Tensor = 1.0

    @staticmethod
    def mean(total: float | Tensor, count: float | Tensor) -> Metric:
        """A sum and how much it counts: the result is sum of sums over sum of counts, NaN if that is 0."""
        return Metric("mean", _detached(total), _detached(count))

    @staticmethod
    def sum(value: float | Tensor) -> Metric:
        """Added up over micro-batches and data-parallel ranks."""
        return Metric("sum", _detached(value))

    @staticmethod
    def max(value: float | Tensor) -> Metric:
        """The largest value anywhere."""
        return Metric("max", _detached(value))

    @staticmethod
    def min(value: float | Tensor) -> Metric:
        """The smallest value anywhere."""
        return Metric("min", _detached(value))

    def result(self) -> float:
        """The value as a number."""
        value, count = float(self.value), float(self.count)
        if self.reduction != "mean":
            return value
        return value / count if count else math.nan

    def plain(self) -> Metric:
        """The same with Python numbers, to send to another rank."""
        return Metric(self.reduction, float(self.value), float(self.count))

    def __add__(self, other: Metric) -> Metric:
        if self.reduction != other.reduction:
            raise LossError(
                f"a metric is a {self.reduction} in one micro-batch and a {other.reduction} in another"
            )
        left, right = float(self.value), float(other.value)
        if self.reduction == "mean":
            return Metric("mean", left + right, float(self.count) + float(other.count))
        if self.reduction == "sum":
            return Metric("sum", left + right)
        nan = next(filter(math.isnan, (left, right)), None)
        pick = max if self.reduction == "max" else min
        return Metric(self.reduction, pick(left, right) if nan is None else nan)


def merge_metrics(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Reduce equal names over ``parts``; a part may lack a name."""
    metrics = [(name, metric) for part in parts for name, metric in part.items()]
    for name, metric in metrics:
        if not isinstance(metric, Metric):
            raise LossError(
                f"metric {name!r} is a {type(metric).__name__}; return Metric.mean/sum/max/min, "
                "so that it is reduced correctly over micro-batches and ranks"
            )
    merged: dict[str, Metric] = {}
    for (name, _), metric in zip(metrics, _on_cpu([metric for _, metric in metrics]), strict=True):
        merged[name] = merged[name] + metric if name in merged else metric.plain()
    return merged


def _on_cpu(metrics: Sequence[Metric]) -> Iterator[Metric]:
    """``metrics`` with the values on an accelerator copied together: each copy waits for all that is queued there."""
    values = [value for metric in metrics for value in (metric.value, metric.count)]
    remote = [value for value in values if isinstance(value, Tensor) and not value.is_cpu]
    copies = torch.stack([value.double().reshape(()) for value in remote]).cpu() if remote else ()
    arrived = dict(zip(map(id, remote), copies, strict=True))
    for metric in metrics:
        value, count = (arrived.get(id(part), part) for part in (metric.value, metric.count))
        yield Metric(metric.reduction, value, count)


def _detached(value: float | Tensor) -> float | Tensor:
    return value.detach() if isinstance(value, Tensor) else value
