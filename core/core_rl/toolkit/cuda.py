"""Kernels that only CUDA has."""

from __future__ import annotations

from inspect import signature

import torch
from torch import Tensor, nn
from torch.nn.attention import activate_flash_attention_impl
from torch.nn.attention.varlen import varlen_attn

from core_rl.backend.train_backend import BuildContext, C
from core_rl.distributed.agreement import on_all
from core_rl.errors import MissingPackage, OutOfDeviceMemory

NAMES_GROUPS = "enable_gqa" in signature(varlen_attn).parameters
"""Whether ``varlen_attn`` has an argument for fewer heads of keys than of queries; torch 2.11 reads it off the shapes.
"""


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
            f"torch cannot use FlashAttention {version} ({error}); install it from "
            "https://github.com/Dao-AILab/flash-attention, or choose version 2"
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
    """The float32 ``total`` plus ``left [N, K] @ right [K, M]``, in place, with sums as in `product`."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif on_cuda(left):
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right


def require_device_memory(context: BuildContext[C], model: nn.Module) -> None:
    """Raise `OutOfDeviceMemory` on all ranks where one has no room for the state of ``model``; collective.

    ``model`` is the whole model, perhaps on the meta device. A backend calls this before it reads weights. The state is
    that of `TrainEngineConfig.state_bytes`. Does nothing on the CPU.
    """
    if context.device.type != "cuda":
        return
    parameters = list(model.parameters())
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    state = context.config.state_bytes(
        sum(parameter.numel() for parameter in parameters), 0 if context.config.optimizer is None else trained
    )
    # Experts are spread over more ranks than other weights: this is the least that a rank has.
    needed = (state.weights + state.gradients + state.moments) / context.config.layout.ep
    on_all(
        context.world, lambda: _require(needed, context.device), "the engine was not built", OutOfDeviceMemory
    )


def _require(needed: float, device: torch.device) -> None:
    free, total = torch.cuda.mem_get_info(device)
    # Memory that torch keeps for this process, as after an engine that was destroyed.
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if free < needed:
        raise OutOfDeviceMemory(
            f"{device} has {_gib(free)} free of {_gib(total)}, and weights, gradients and moments of a rank need "
            f"{_gib(needed)}; end the process that fills it, give the engine other devices (devices of an "
            "EngineGroup, CUDA_VISIBLE_DEVICES), or spread the model over more ranks (layout)"
        )


def _gib(size: float) -> str:
    return f"{size / 2**30:,.1f} GiB"
