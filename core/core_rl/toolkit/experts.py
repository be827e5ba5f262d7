"""Mixture-of-experts models: which they are, and the kernel that computes their experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from torch import nn
from transformers import PreTrainedModel

__all__ = ["ExpertsKernel", "use_experts_kernel"]

ExpertsKernel = Literal["eager", "grouped"]
"""``eager`` is transformers' loop over experts, ``grouped`` one grouped matrix product for all of them."""

ALIGNMENT = 8
"""Row lengths that grouped products take are multiples of 16 bytes: 8 numbers in half precision."""


def use_experts_kernel(model: PreTrainedModel, kernel: ExpertsKernel) -> None:
    """Compute the experts of ``model``, if it has any, by ``kernel``; sizes that no grouped product takes are eager.

    Both are differentiable in float32 and bfloat16, on the CPU and on CUDA. Both give an expert
    without tokens a gradient of zero, so that every rank has the same gradients to reduce.
    """
    experts = list(_experts(model))
    if not experts:
        return
    aligned = all(
        size % ALIGNMENT == 0
        for module in experts
        for parameter in module.parameters(recurse=False)
        if parameter.dim() == 3
        for size in parameter.shape[1:]
    )
    model.set_experts_implementation("grouped_mm" if kernel == "grouped" and aligned else "eager")


def _experts(model: PreTrainedModel) -> Iterator[nn.Module]:
    """The modules that transformers' ``use_experts_implementation`` marks."""
    return (module for module in model.modules() if hasattr(module, "is_concatenated"))
