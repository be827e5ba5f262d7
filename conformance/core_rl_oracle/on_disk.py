"""Tensors of a large model in temporary files, which the system reads and writes page by page.

The files are in ``TMPDIR``, have no name, and end with their tensors. Other devices keep tensors in their own memory.
"""

from __future__ import annotations

import os
from tempfile import NamedTemporaryFile

import torch
from torch import Tensor, nn

LARGE = 1 << 16
"""Numbers of a tensor that is worth a file; tiny models have none."""


def copied(tensor: Tensor) -> Tensor:
    """A copy of ``tensor``, of a large one in a file."""
    if tensor.numel() < LARGE or tensor.device.type != "cpu":
        return tensor.detach().clone()
    with NamedTemporaryFile(prefix="core-rl-") as file:
        # A full disk is an error here, and would end the process where a page is written.
        os.posix_fallocate(file.fileno(), 0, tensor.nbytes)
        copy = torch.from_file(file.name, shared=True, size=tensor.numel(), dtype=tensor.dtype)
    return copy.view(tensor.shape).copy_(tensor.detach())


def move_to_disk(model: nn.Module) -> None:
    """Move large parameters of ``model`` to files, and each of their gradients as soon as it is there.

    A backward pass then needs the memory of one gradient.
    """
    for parameter in model.parameters():
        if parameter.numel() >= LARGE:
            parameter.data = copied(parameter)
            parameter.register_post_accumulate_grad_hook(_move_gradient)


def _move_gradient(parameter: Tensor) -> None:
    grad = parameter.grad
    if grad is not None and grad.device.type == "cpu" and grad.untyped_storage().filename is None:
        parameter.grad = copied(grad)
