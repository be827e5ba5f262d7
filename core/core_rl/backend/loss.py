"""The loss contract: a loss returns a sum and how much it counts; the core divides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor

from core_rl.backend.metrics import Metric
from core_rl.data.batch import SequenceBatch
from core_rl.data.outputs import ModelOutput, OutputName
from core_rl.errors import LossError

LossFn = Callable[[ModelOutput, SequenceBatch], tuple[Tensor, Mapping[str, Metric]]]
WeightFn = Callable[[SequenceBatch], float]


def count_tokens(batch: SequenceBatch) -> float:
    """The number of trained tokens: the weight of a token-mean loss."""
    return float(batch.loss_mask.sum())


def count_sequences(batch: SequenceBatch) -> float:
    """The number of sequences with a trained token: the weight of a sequence-mean loss."""
    mask, bounds = batch.loss_mask, batch.cu_seqlens.tolist()
    return float(sum(bool(mask[start:end].any()) for start, end in zip(bounds[:-1], bounds[1:], strict=True)))


@dataclass(frozen=True, kw_only=True)
class LossSpec:
    """A loss over whole packed sequences.

    It travels to other processes, so ``fn`` and ``weight_fn`` must be picklable: functions of a
    module, or frozen callables with their settings as fields, not lambdas.
    """

    fn: LossFn
    """``fn(output, batch) -> (total, metrics)``; ``total`` is a scalar **sum** over counted tokens or sequences."""
    weight_fn: WeightFn = count_tokens
    """Weight of this batch. Gradients are of (sum of totals) / (sum of weights)."""
    outputs: tuple[OutputName, ...] = ("logprobs",)
    temperature: float = 1.0
    """Applied to log-probs, entropy and logits, never to values."""
    normalize_scope: Literal["global", "dp"] = "global"
    """``global`` divides by the weight of all data-parallel ranks; ``dp`` averages the ranks' own means."""

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise LossError(f"LossSpec.temperature = {self.temperature}; it must be positive")
        if not self.outputs:
            raise LossError(
                "LossSpec.outputs is empty; name the outputs that the loss needs, such as ('logprobs',)"
            )

    def weight(self, batch: SequenceBatch) -> float:
        """``weight_fn(batch)``, checked: finite and not negative."""
        weight = float(self.weight_fn(batch))
        if not 0 <= weight < float("inf"):
            raise LossError(f"weight_fn returned {weight}; a weight is finite and not negative")
        return weight

    def total(self, output: ModelOutput, batch: SequenceBatch) -> tuple[Tensor, Mapping[str, Metric]]:
        """``fn(output, batch)``, checked: a scalar tensor and a mapping of `Metric`."""
        result: object = self.fn(output, batch)
        if not (isinstance(result, tuple) and len(result) == 2):
            raise LossError(f"the loss must return (total, metrics); it returned a {type(result).__name__}")
        total, metrics = cast("tuple[object, Mapping[str, Metric]]", result)
        if not isinstance(total, torch.Tensor) or total.dim() != 0:
            shape = list(total.shape) if isinstance(total, torch.Tensor) else type(total).__name__
            raise LossError(f"the loss must return a scalar sum; its total is {shape}. Sum over the tokens")
        return total, metrics
