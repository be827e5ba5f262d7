"""Modules that FSDP2 has sharded: sums of their gradients, and the way back after passes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from core_rl.config.layout import ParallelLayout
from core_rl.errors import LayoutError


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
        elif gradients.is_cuda:
            # Asked for in the stream of reductions, which adds up micro-batches there after FSDP has let go of it.
            gradients.record_stream(torch.cuda.current_stream(device))
        return gradients

    def reset(self) -> None:
        """Forget memory of a pass that raised in between."""
        self._gradients = None

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        raise AssertionError("a lone rank has nothing to communicate")


def fsdp_modules(root: nn.Module) -> Iterator[FSDPModule]:
    """The modules of ``root`` whose parameters are gathered together."""
    return (module for module in root.modules() if isinstance(module, FSDPModule))


def add_up_gradients(root: nn.Module, ranks: int) -> None:
    """Have the ``ranks`` of FSDP's mesh add up their gradients, without a division."""
    for module in fsdp_modules(root):
        # The core has already divided the loss by the global weight, so ranks add up. FSDP
        # would average, and gloo has no pre-multiplied sum.
        module.set_force_sum_reduction_for_comms(True)
        if ranks > 1:
            module.set_gradient_divide_factor(1.0)
        else:  # where FSDP would compute ``gradient / 1.0`` into memory of its own, and copy that
            module.set_custom_reduce_scatter(InPlaceReduceScatter())


def reshard(root: nn.Module) -> None:
    """Free gathered weights after forward passes alone.

    A backward pass frees the root's; without one they would stay, and the next forward pass would use them although
    the shards may have changed by then.
    """
    for module in fsdp_modules(root):
        module.reshard()


def reset_pass(root: FSDPModule) -> None:
    """Free gathered weights and unreduced gradients after a pass that raised. No collective."""
    if root._get_fsdp_state()._is_root is None:
        return  # the first pass has not begun
    root.reset_iter_state()
    for module in fsdp_modules(cast("nn.Module", root)):
        group = module._get_fsdp_state()._fsdp_param_group
        if group is None:
            continue
        if isinstance(group._reduce_scatter_comm, InPlaceReduceScatter):
            group._reduce_scatter_comm.reset()
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            unsharded: nn.Parameter | None = getattr(parameter, "_unsharded_param", None)
            if unsharded is not None:
                unsharded.grad = None


def check_copies(layout: ParallelLayout, replicas: int) -> None:
    """Raise `LayoutError` where ``layout`` has no room for ``replicas`` copies of the weights."""
    if layout.dp % replicas:
        raise LayoutError(
            f"options.replicas={replicas} must divide dp={layout.dp}: each copy of the weights is sharded over "
            "dp / replicas ranks; change either"
        )
    ranks = layout.dp // replicas * layout.cp
    if ranks % layout.ep:
        raise LayoutError(
            f"ep={layout.ep} must divide dp / replicas * cp = {ranks}: experts are spread over the ranks that share "
            "one copy of the weights; change either"
        )
