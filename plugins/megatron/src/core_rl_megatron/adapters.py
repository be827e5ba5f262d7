"""Low-rank adapters (LoRA, arXiv:2106.09685) of Megatron's linear layers: one for each projection in a fused layer.

Tensor parallel ranks divide one factor as the weight is divided, and all have the other one. Ranks exchange ``A x``
only: ``rank`` numbers for each token and projection.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import zip_longest
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
from core_rl_megatron.experts import TokenLinear
from core_rl_megatron.naming import RowBox


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
        if not isinstance(layer, ColumnParallelLinear | RowParallelLinear | TokenLinear):
            continue
        adapted = boxes.get(layer.weight, ())
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


def _joined(name: str, parts: Sequence[RowBox]) -> Iterator[RowBox]:
    """Boxes of the rows of ``B``, one for rows that follow each other in the checkpoint; ``parts`` are in its order."""
    start = stop = 0
    for box, after in zip_longest(parts, parts[1:]):
        stop += box.stop - box.start
        if after is None or after.offsets[0] != box.offsets[0] + box.stop - box.start:
            yield RowBox(name, start, stop, (box.offsets[0] + box.stop - box.start - (stop - start), 0))
            start = stop


class LinearAdapter(nn.Module):
    """Adapters of the linear ``layer``, whose weight has the ``boxes`` of projections, such as ``[q of a group | k |
    v]`` for each group of heads, or ``[gate | up]``. Rows of ``B`` are in the order of the checkpoint.
    """

    enabled: bool = True
    order: Tensor | None
    """For each row of the weight, its number among the rows of all ``B``; None where they have one order, and one more
    than the last for a row without an adapter."""

    def __init__(
        self, layer: Any, boxes: Sequence[RowBox], products: Mapping[str, LowRank], lora: LoraConfig
    ) -> None:
        super().__init__()
        self._divides_outputs = isinstance(layer, ColumnParallelLinear)
        self._divides_inputs = isinstance(layer, RowParallelLinear)
        self._spreads_tokens = bool(layer.sequence_parallel)
        self._tensor_ranks = getattr(layer, "tp_group", None)
        self._dropout = lora.dropout
        self.projections = nn.ModuleList()
        self.boxes: dict[nn.Parameter, tuple[RowBox, ...]] = {}
        """Boxes of the factors."""
        order = torch.full((len(layer.weight),), -1)
        total = 0
        for name in dict.fromkeys(box.name for box in boxes):
            if (product := products.get(name)) is None:
                continue
            parts = sorted((box for box in boxes if box.name == name), key=lambda box: box.offsets)
            rows = sum(box.stop - box.start for box in parts)
            projection = Projection(layer.weight, rows, lora.rank, product.scaling)
            self.projections.append(projection)
            self.boxes[projection.lora_A] = (RowBox(product.a, 0, lora.rank, (0, parts[0].offsets[1])),)
            self.boxes[projection.lora_B] = tuple(_joined(product.b, parts))
            for box in parts:
                order[box.start : box.stop] = torch.arange(total, total + box.stop - box.start)
                total += box.stop - box.start
            # With sequence parallelism a factor that all ranks have meets the tokens of this rank only: its
            # gradient is a part of the sum, which Megatron adds up where a parameter has this mark.
            cast("Any", projection.lora_A).sequence_parallel = (
                self._spreads_tokens and not self._divides_inputs
            )
            cast("Any", projection.lora_B).sequence_parallel = (
                self._spreads_tokens and not self._divides_outputs
            )
        order = torch.where(order < 0, total, order)
        in_order = len(order) == total and torch.equal(order, torch.arange(total))
        self.register_buffer("order", None if in_order else order.to(layer.weight.device), persistent=False)

    def add_to(
        self, _: nn.Module, inputs: tuple[Tensor], output: tuple[Tensor, Tensor | None]
    ) -> tuple[Tensor, Tensor | None]:
        """Forward hook of the layer: its output ``[L, 1, out]``, with ``scaling * B A x`` added for each projection."""
        if not self.enabled:
            return output
        projections = [cast("Projection", module) for module in self.projections]
        factors = [projection() for projection in projections]
        low = torch.cat([F.linear(self._dropped(inputs[0]), a) for a, _ in factors], -1)
        lows = self._exchanged(low).chunk(len(projections), -1)
        added = torch.cat(
            [
                projection.scaling * F.linear(projected, b)
                for projection, (_, b), projected in zip(projections, factors, lows, strict=True)
            ],
            -1,
        )
        if self.order is not None:
            added = F.pad(added, (0, 1)).index_select(-1, self.order)
        return output[0] + added, output[1]

    def _dropped(self, hidden: Tensor) -> Tensor:
        """``hidden`` with dropout, which each projection draws for itself, as in ``peft``."""
        if not (self.training and self._dropout):
            return hidden
        same = not (self._divides_inputs or self._spreads_tokens)  # on all tensor parallel ranks
        with nullcontext() if same else get_cuda_rng_tracker().fork():
            return F.dropout(hidden, self._dropout)

    def _exchanged(self, low: Tensor) -> Tensor:
        """``A x`` of all tokens where ``B`` is divided, and of the tokens of the layer's output otherwise."""
        if not (self._divides_inputs or self._divides_outputs):
            return low
        exchange = {
            (True, False): copy_to_tensor_model_parallel_region,
            (True, True): gather_from_sequence_parallel_region,
            (False, False): reduce_from_tensor_model_parallel_region,
            (False, True): reduce_scatter_to_sequence_parallel_region,
        }[self._divides_outputs, self._spreads_tokens]
        exchanged: Tensor = exchange(low, group=self._tensor_ranks)
        return exchanged
