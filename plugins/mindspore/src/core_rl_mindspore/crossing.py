"""Tensors of torch and of MindSpore in the same memory, and a loss of torch inside of MindSpore's graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mindspore
import torch
from torch import Tensor

__all__ = ["launch_in_order", "loss_of_torch", "to_mindspore", "to_torch"]

TorchLoss = Callable[[Sequence[Tensor]], Tensor]


def launch_in_order() -> None:
    """Have MindSpore finish each kernel before its call returns, as torch does on the CPU.

    Otherwise torch would read memory that a kernel of MindSpore has yet to write.
    """
    mindspore.runtime.launch_blocking()


def to_torch(tensor: mindspore.Tensor) -> Tensor:
    """A writable view of the memory of ``tensor``."""
    return torch.from_numpy(tensor.asnumpy())


def to_mindspore(tensor: Tensor) -> mindspore.Tensor:
    """A view of the memory of ``tensor``, or of a contiguous copy."""
    return mindspore.from_dlpack(tensor.detach().contiguous().__dlpack__())


def loss_of_torch(loss: TorchLoss, outputs: Sequence[mindspore.Tensor]) -> mindspore.Tensor:
    """The scalar ``loss`` of ``outputs``, computed in torch; MindSpore passes its gradient on, if torch records one."""
    return _LossOfTorch.apply(loss, *outputs) if outputs else to_mindspore(loss([]))


class _LossOfTorch(mindspore._Function):  # type: ignore[misc]
    """A loss that is differentiated itself: the gradient that comes in is 1."""

    @staticmethod
    def forward(ctx: Any, loss: TorchLoss, *outputs: mindspore.Tensor) -> mindspore.Tensor:
        leaves = [to_torch(output).requires_grad_(torch.is_grad_enabled()) for output in outputs]
        value = loss(leaves)
        if value.requires_grad:
            ctx.grads = [to_mindspore(grad) for grad in torch.autograd.grad(value, leaves)]
        return to_mindspore(value)

    @staticmethod
    def backward(ctx: Any, grad: mindspore.Tensor) -> tuple[mindspore.Tensor | None, ...]:
        return None, *ctx.grads
