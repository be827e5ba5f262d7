"""Outputs of an engine's forward pass, for a loss or for the caller, and reductions of them over masks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

import torch
from torch import Tensor

from core_rl.data.pinned import to_device
from core_rl.errors import EngineContractError, LossError, raise_all

__all__ = [
    "ROUTING_DTYPE",
    "SEQUENCE_OUTPUTS",
    "ModelOutput",
    "OutputName",
    "masked_fill",
    "masked_mean",
    "masked_sum",
    "segment_sum",
]

OutputName = Literal[
    "logprobs", "entropy", "values", "scores", "logits", "aux_loss", "routing", "hidden_states"
]
TOKEN_OUTPUTS = ("logprobs", "entropy", "values", "logits")
ROUTING_DTYPE = torch.int16
"""At 48 layers and 8 experts for each token, int64 would take 3 KB a token."""
DTYPES = {"routing": ROUTING_DTYPE}
SEQUENCE_OUTPUTS = ("scores", "bootstrap")


@dataclass(frozen=True, kw_only=True)
class ModelOutput:
    """Values of one packed batch; a field is None unless it was requested."""

    logprobs: Tensor | None = None
    """``log p(x_t | x_<t)`` at the requested temperature, float32 ``[T]``; 0 at first tokens."""
    entropy: Tensor | None = None
    """Entropy in nats of the distribution that ``x_t`` was drawn from, float32 ``[T]``; 0 at first tokens."""
    values: Tensor | None = None
    """Value of the state before ``x_t``, float32 ``[T]``; 0 at first tokens."""
    bootstrap: Tensor | None = None
    """Value of the state after the last token, float32 ``[B]``; comes with ``values``."""
    scores: Tensor | None = None
    """Reward of each whole sequence, float32 ``[B]``."""
    logits: Tensor | None = None
    """Logits that ``x_t`` was drawn from, divided by the temperature, float32 ``[T, V]``; 0 at first tokens."""

    aux_loss: Tensor | None = None
    """The load-balancing loss of the routers, a float32 scalar **sum** over all tokens of the batch."""

    routing: Tensor | None = None
    """The experts that each layer with a router chose for ``x_t``, int16 ``[T, layers, k]``."""

    hidden_states: Tensor | None = None
    """States of ``x_t`` before the first layer and after each, float32 ``[T, layers + 1, H]``; of `forward` alone."""

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Names and values of the fields that are not None."""
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                yield field.name, value

    def __getitem__(self, name: str) -> Tensor:
        value = getattr(self, name, None)
        if not isinstance(value, Tensor):
            listed = "'values'" if name == "bootstrap" else "it"
            raise LossError(f"the output {name!r} was not computed; list {listed} in 'outputs'")
        return value

    def masked(self, loss_mask: Tensor) -> ModelOutput:
        """Token outputs with 0, and no gradient, where ``loss_mask [T]`` is false."""
        values = dict(self.items())
        for name in TOKEN_OUTPUTS:
            if name in values:
                mask = loss_mask if values[name].dim() == 1 else loss_mask[:, None]
                values[name] = masked_fill(values[name], mask)
        return replace(self, **values)

    def detached(self) -> ModelOutput:
        """The same numbers on the CPU without a graph."""
        return replace(self, **{name: value.detach().to("cpu") for name, value in self.items()})

    def zero_loss(self) -> Tensor:
        """A scalar 0 that is connected to every output's graph and passes a gradient of exactly 0."""
        terms = [
            masked_fill(value, torch.zeros_like(value, dtype=torch.bool)).sum() for _, value in self.items()
        ]
        return torch.stack([term.float() for term in terms]).sum() if terms else torch.zeros(())

    def check(self, requested: Sequence[str], num_tokens: int, num_sequences: int) -> None:
        """Raise `EngineContractError` unless the requested outputs exist and have the right dtype and length."""
        problems = []
        for name in [*requested, *["bootstrap"] * ("values" in requested)]:
            value = getattr(self, name)
            length = num_sequences if name in SEQUENCE_OUTPUTS else num_tokens
            dtype = DTYPES.get(name, torch.float32)
            if name == "aux_loss" and isinstance(value, Tensor) and value.dim() == 0:
                continue
            if not isinstance(value, Tensor):
                why = "comes with 'values'" if name == "bootstrap" else "was requested"
                problems.append(f"output {name!r} {why} and is {type(value).__name__}")
            elif value.dtype != dtype or value.dim() < 1 or len(value) != length:
                expected = f"{str(dtype).removeprefix('torch.')} [{length}]"
                problems.append(f"output {name!r} is {value.dtype} {list(value.shape)}, not {expected}")
        raise_all(EngineContractError, "the engine's forward", problems)


def masked_fill(values: Tensor, mask: Tensor) -> Tensor:
    """``values`` where ``mask`` is true and 0 elsewhere; no gradient flows to the rest. Same shape.

    It selects, and never multiplies by the mask: ``0 * NaN`` is NaN.
    """
    return torch.where(mask.bool(), values, torch.zeros((), dtype=values.dtype, device=values.device))


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """The scalar sum of ``values [T]`` where ``mask [T]`` is true; 0 when it is true nowhere."""
    return masked_fill(values, mask).sum()


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """The scalar mean of ``values [T]`` where ``mask [T]`` is true; 0 when it is true nowhere.

    For metrics inside one batch. A loss returns sums instead: means of means depend on the cut.
    """
    return masked_sum(values, mask) / mask.bool().sum().clamp(min=1)


def segment_sum(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Per-sequence sums ``[B, ...]`` of token values ``[T, ...]``, in the dtype of ``values``."""
    lengths = cu_seqlens.diff().long()
    numbers = torch.arange(len(lengths), device=lengths.device)
    owner = to_device(torch.repeat_interleave(numbers, lengths, output_size=len(values)), values.device)
    return values.new_zeros((len(lengths), *values.shape[1:])).index_add(0, owner, values)
