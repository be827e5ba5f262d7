"""Low-rank adapters (LoRA, arXiv:2106.09685) of Megatron's linear layers: one for each projection in a fused layer.

Tensor parallel ranks divide one factor as the weight is divided, and all have the other one. Ranks exchange ``A x``
only: ``rank`` numbers for each token and projection.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor, nn
from torch.nn import functional as F

from core_rl.backend.protocols import LowRank
from core_rl.config.engine import LoraConfig
from core_rl_megatron.naming import RowBox

__all__ = ["add_adapters", "enable_adapters"]


def add_adapters(
    chunk: nn.Module,
    boxes: Mapping[nn.Parameter, tuple[RowBox, ...]],
    products: Mapping[str, LowRank],
    lora: LoraConfig,
) -> dict[nn.Parameter, tuple[RowBox, ...]]:
    """Add its adapters to ``chunk``, whose parameters have ``boxes``; return the boxes of their factors.

    ``products`` cover the whole model, by the checkpoint name of the weight. The factors have no values yet.
    """
    factor_boxes: dict[nn.Parameter, tuple[RowBox, ...]] = {}
    for layer in [*chunk.modules()]:
        adapted = (
            boxes.get(layer.weight, ()) if isinstance(layer, ColumnParallelLinear | RowParallelLinear) else ()
        )
        if any(box.name in products for box in adapted):
            adapter = LinearAdapter(layer, adapted, products, lora)
            layer.add_module("adapter", adapter)
            layer.register_forward_hook(adapter.add_to)
            factor_boxes |= adapter.boxes
    return factor_boxes


def enable_adapters(chunk: nn.Module, enabled: bool) -> None:
    """Turn the adapters of ``chunk`` on or off in forward passes."""
    for module in chunk.modules():
        if isinstance(module, LinearAdapter):
            module.enabled = enabled


class Projection(nn.Module):
    """This rank's parts of the factors of one projection: ``A [rank, in]`` and ``B [out, rank]``."""

    def __init__(self, weight: Tensor, rows: int, rank: int, scaling: float) -> None:
        super().__init__()
        self.lora_A = nn.Parameter(weight.new_empty(rank, weight.shape[1]))
        self.lora_B = nn.Parameter(weight.new_empty(rows, rank))
        self.scaling = scaling

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return A and B. Megatron's forward hooks wait for the weights of a module (``overlap_param_gather``)."""
        return self.lora_A, self.lora_B


class LinearAdapter(nn.Module):
    """Adapters of the linear ``layer``, whose weight has the ``boxes`` of projections, group after group of heads.

    The order of rows is that of the weight: ``[q of the group | k | v]`` for each group, or ``[gate | up]``.
    """

    enabled: bool = True

    def __init__(
        self, layer: Any, boxes: Sequence[RowBox], products: Mapping[str, LowRank], lora: LoraConfig
    ) -> None:
        super().__init__()
        self._divides_outputs = isinstance(layer, ColumnParallelLinear)
        self._spreads_tokens = bool(layer.sequence_parallel)
        self._tensor_ranks = layer.tp_group
        self._dropout = lora.dropout
        first = {box.name: box for box in reversed(boxes)}
        names = list(dict.fromkeys(box.name for box in boxes))
        self._groups = len(boxes) // len(names)
        self._rows = [first[name].stop - first[name].start for name in names]
        self.projections = nn.ModuleList()
        self._numbers = []
        """Which projection of a group each of `projections` belongs to."""
        self.boxes: dict[nn.Parameter, tuple[RowBox, ...]] = {}
        """Boxes of the factors."""
        for number, name in enumerate(names):
            if (product := products.get(name)) is None:
                continue
            rows = self._rows[number] * self._groups
            projection = Projection(layer.weight, rows, lora.rank, product.scaling)
            self.projections.append(projection)
            self._numbers.append(number)
            row, column = first[name].offsets
            self.boxes[projection.lora_A] = (RowBox(product.a, 0, lora.rank, (0, column)),)
            self.boxes[projection.lora_B] = (RowBox(product.b, 0, rows, (row, 0)),)
            # With sequence parallelism the factor that all ranks have meets the tokens of this rank only: its
            # gradient is a part of the sum, which Megatron adds up where a parameter has this mark.
            replicated = projection.lora_A if self._divides_outputs else projection.lora_B
            cast("Any", replicated).sequence_parallel = self._spreads_tokens

    def add_to(
        self, _: nn.Module, inputs: tuple[Tensor], output: tuple[Tensor, Tensor | None]
    ) -> tuple[Tensor, Tensor | None]:
        """Forward hook of the layer: its output ``[L, 1, out]``, with ``scaling * B A x`` added for each projection."""
        if not self.enabled:
            return output
        projections = [cast("Projection", module) for module in self.projections]
        factors = [projection() for projection in projections]
        low = torch.cat([F.linear(self._dropped(inputs[0]), a) for a, _ in factors], -1)
        parts = [*output[0].unflatten(-1, (self._groups, -1)).split(self._rows, -1)]
        lows = self._exchanged(low).chunk(len(projections), -1)
        for number, projection, (_, b), projected in zip(
            self._numbers, projections, factors, lows, strict=True
        ):
            product = projection.scaling * F.linear(projected, b)
            parts[number] = parts[number] + product.unflatten(-1, (self._groups, -1))
        return torch.cat(parts, -1).flatten(-2), output[1]

    def _dropped(self, hidden: Tensor) -> Tensor:
        """``hidden`` with dropout, which each projection draws for itself, as in ``peft``."""
        if not (self.training and self._dropout):
            return hidden
        same = self._divides_outputs and not self._spreads_tokens  # on all tensor parallel ranks
        with nullcontext() if same else get_cuda_rng_tracker().fork():
            return F.dropout(hidden, self._dropout)

    def _exchanged(self, low: Tensor) -> Tensor:
        """``A x`` of all tokens where ``B`` is divided, and of the tokens of the layer's output otherwise."""
        exchange = {
            (True, False): copy_to_tensor_model_parallel_region,
            (True, True): gather_from_sequence_parallel_region,
            (False, False): reduce_from_tensor_model_parallel_region,
            (False, True): reduce_scatter_to_sequence_parallel_region,
        }[self._divides_outputs, self._spreads_tokens]
        exchanged: Tensor = exchange(low, group=self._tensor_ranks)
        return exchanged
