"""Kernels that only CUDA has."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import activate_flash_attention_impl

from core_rl.errors import MissingPackage

__all__ = ["add_product", "on_cuda", "product", "use_flash_attention"]


def on_cuda(tensor: Tensor) -> bool:
    """Whether kernels of CUDA work on ``tensor``."""
    return tensor.is_cuda


def use_flash_attention(version: int) -> None:
    """Have this process's FlashAttention be of ``version``, torch's own 2 or that of an installed package.

    Raises `MissingPackage` where there is none.
    """
    if version == 2:
        return
    try:
        activate_flash_attention_impl(f"FA{version}")
    except (ImportError, RuntimeError, ValueError) as error:
        raise MissingPackage(
            f"options.flash_attention = {version}: torch cannot use FlashAttention {version} ({error}); install it "
            "from https://github.com/Dao-AILab/flash-attention, or set options.flash_attention to 2"
        ) from error


def product(left: Tensor, right: Tensor, out: Tensor) -> None:
    """``left [N, K] @ right [K, M]`` into the float32 ``out``.

    CUDA does not round the sums of a bfloat16 product on the way. The CPU does: its product has the inputs' dtype.
    """
    if left.dtype == out.dtype:
        torch.mm(left, right, out=out)
    elif on_cuda(left):
        torch.mm(left, right, out_dtype=out.dtype, out=out)
    else:
        out.copy_(left @ right)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """The float32 ``total`` plus ``left [N, K] @ right [K, M]``, in place, with sums as those of `product`."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif on_cuda(left):
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right
