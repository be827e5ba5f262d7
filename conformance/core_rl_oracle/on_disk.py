"""Weights and gradients of a large model in files, which the system reads and writes page by page."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

LARGE = 1 << 16
"""Numbers of a tensor that is worth a file."""


def copied(tensor: Tensor, disk: Path | None) -> Tensor:
    """A copy of ``tensor``; a large one in a file of the directory ``disk`` without a name, closed with the copy."""
    if disk is None or tensor.numel() < LARGE:
        return tensor.detach().clone()
    with tempfile.NamedTemporaryFile(dir=disk) as file:
        copy = torch.from_file(file.name, shared=True, size=tensor.numel(), dtype=tensor.dtype)
    return copy.view(tensor.shape).copy_(tensor.detach())


def move_to_disk(model: nn.Module, disk: Path) -> None:
    """Move the parameters of ``model`` to files of ``disk``, and each gradient as soon as it is there.

    A backward pass then needs the memory of one gradient.
    """

    def move_gradient(parameter: Tensor) -> None:
        grad = parameter.grad
        if grad is not None and grad.untyped_storage().filename is None:
            parameter.grad = copied(grad, disk)

    for parameter in model.parameters():
        if parameter.numel() >= LARGE:
            parameter.data = copied(parameter, disk)
            parameter.register_post_accumulate_grad_hook(move_gradient)
