"""Heads of a decoder: tensors of MindSpore that the loss depends on, and the outputs that torch makes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Protocol

import torch
from mindspore import Parameter, Tensor, float32, float64, mint, nn, ops

from core_rl.backend.steps import MicroBatchStep
from core_rl.data.batch import SequenceBatch
from core_rl.data.outputs import ModelOutput
from core_rl.toolkit.token_logprobs import KEEP_BYTES, chunk_rows
from core_rl_mindspore.crossing import to_mindspore

__all__ = ["head_of"]


def head_of(kind: str, weights: Mapping[str, Parameter]) -> Head:
    """The head of the ``kind`` of `ModelConfig.head`; a tied one has the weights of the embedding."""
    if kind != "lm":
        return ScalarHead(weights["score.weight"])
    return LanguageModelHead(weights.get("lm_head.weight", weights["model.embed_tokens.weight"]))


class Head(Protocol):
    """One of the heads of a model."""

    def values(self, hidden: Tensor, batch: SequenceBatch, step: MicroBatchStep) -> Sequence[Tensor]:
        """What ``step`` needs of the hidden states ``[T, H]``."""

    def output(
        self, values: Sequence[torch.Tensor], batch: SequenceBatch, step: MicroBatchStep
    ) -> ModelOutput:
        """The outputs of `values`, each at the place of its token."""


class LanguageModelHead:
    """Log-probs, entropy and logits, of predicted tokens alone, in chunks."""

    def __init__(self, weight: Parameter) -> None:
        self.weight = weight

    def values(self, hidden: Tensor, batch: SequenceBatch, step: MicroBatchStep) -> Sequence[Tensor]:
        """One tensor ``[N, ...]`` for each output; none of a batch without predicted tokens.

        Where the logits of all rows take more than `KEEP_BYTES`, the backward pass makes each chunk again.
        """
        positions = batch.predicted(trained_only=step.trained_only)
        count, row_bytes = len(positions), 4 * len(self.weight)
        if not count:
            return []
        states = ops.gather(hidden, to_mindspore(positions - 1), 0)
        targets = to_mindspore(batch.input_ids[positions])
        cell = TokenValues()
        if count * row_bytes > KEEP_BYTES:
            cell.recompute(use_reentrant=False)
        bounds = pairwise([*range(0, count, chunk_rows(row_bytes, on_cpu=True)), count])
        chunks = [
            cell(states[a:b], self.weight, targets[a:b], step.outputs, step.temperature) for a, b in bounds
        ]
        return [mint.cat(parts, 0) for parts in zip(*chunks, strict=True)]

    def output(
        self, values: Sequence[torch.Tensor], batch: SequenceBatch, step: MicroBatchStep
    ) -> ModelOutput:
        positions = batch.predicted(trained_only=step.trained_only)
        if not values:
            shapes = {"logits": (0, len(self.weight))}
            values = [torch.zeros(shapes.get(name, (0,))) for name in step.outputs]
        placed = (_placed(value, positions, batch.num_tokens) for value in values)
        return ModelOutput(**dict(zip(step.outputs, placed, strict=True)))


class TokenValues(nn.Cell):  # type: ignore[misc]
    """Values of predicted tokens, from the states that predict them."""

    def construct(
        self, states: Tensor, head: Parameter, targets: Tensor, names: Sequence[str], temperature: float
    ) -> tuple[Tensor, ...]:
        """``names`` among ``logprobs [N]``, ``entropy [N]`` and ``logits [N, V]``.

        Of states ``[N, H]``, a head ``[V, H]`` and int64 targets ``[N]``.
        """
        logits = mint.nn.functional.linear(states, head) / temperature
        # float64: MindSpore 2.10 has an approximation of the float32 exponential for the CPU, which is 1e-5 off.
        wide = logits.astype(float64)
        log_p = wide - ops.logsumexp(wide, -1, keepdim=True)
        values = {"logits": logits, "logprobs": mint.gather(log_p, 1, targets[:, None]).squeeze(1)}
        if "entropy" in names:
            values["entropy"] = -(mint.exp(log_p) * log_p).sum(-1)
        return tuple(values[name].astype(float32) for name in names)


class ScalarHead:
    """A value or a reward of each state: a linear map without bias."""

    def __init__(self, weight: Parameter) -> None:
        self.weight = weight

    def values(self, hidden: Tensor, batch: SequenceBatch, step: MicroBatchStep) -> Sequence[Tensor]:
        """The scores ``[T]`` of all states."""
        return [mint.nn.functional.linear(hidden, self.weight).squeeze(1)]

    def output(
        self, values: Sequence[torch.Tensor], batch: SequenceBatch, step: MicroBatchStep
    ) -> ModelOutput:
        (scores,) = values
        final = scores[batch.cu_seqlens[1:].long() - 1]
        if "values" not in step.outputs:
            return ModelOutput(scores=final)
        positions = batch.predicted(trained_only=False)
        return ModelOutput(
            values=_placed(scores[positions - 1], positions, batch.num_tokens), bootstrap=final
        )


def _placed(values: torch.Tensor, positions: torch.Tensor, count: int) -> torch.Tensor:
    """``count`` entries, 0 but for ``values`` at ``positions``."""
    return values.new_zeros((count, *values.shape[1:])).index_copy(0, positions, values)
