"""Gradients of a lone rank, which no other has to be added to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

__all__ = ["InPlaceReduceScatter"]


class InPlaceReduceScatter(ReduceScatter):
    """Gives FSDP the same memory for the sum of gradients as for the gradients of the one rank that there is.

    FSDP asks for one and then for the other, and copies from there to here, which does nothing in place.
    """

    def __init__(self) -> None:
        self._gradients: Tensor | None = None

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        gradients, self._gradients = self._gradients, None
        if gradients is None:
            gradients = self._gradients = torch.empty(size, dtype=dtype, device=device)
        return gradients

    def reset(self) -> None:
        """Forget memory of a pass that raised in between."""
        self._gradients = None

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        raise AssertionError("a lone rank has nothing to communicate")
