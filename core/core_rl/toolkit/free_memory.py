"""Free memory of an accelerator, asked before a model is loaded."""

from __future__ import annotations

import torch
from torch import nn

from core_rl.backend.train_backend import BuildContext, C
from core_rl.config.engine import TrainEngineConfig
from core_rl.distributed.agreement import on_all
from core_rl.errors import OutOfDeviceMemory

__all__ = ["require_device_memory"]


def require_device_memory(context: BuildContext[C], model: nn.Module) -> None:
    """Raise `OutOfDeviceMemory` on all ranks where one has no room for the state of ``model``; collective.

    ``model`` is the whole model, perhaps on the meta device. A backend calls this before it reads weights. The state is
    that of `TrainEngineConfig.state_bytes`. Does nothing on the CPU.
    """
    if context.device.type != "cuda":
        return
    needed = _needed(context.config, model)
    on_all(
        context.world,
        lambda: _require(needed, context.device),
        "the engine was not built",
        OutOfDeviceMemory,
    )


def _needed(config: TrainEngineConfig, model: nn.Module) -> float:
    parameters = list(model.parameters())
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    state = config.state_bytes(
        sum(parameter.numel() for parameter in parameters), 0 if config.optimizer is None else trained
    )
    # Experts are spread over more ranks than other weights: this is the least that a rank has.
    return (state.weights + state.gradients + state.moments) / config.layout.ep


def _require(needed: float, device: torch.device) -> None:
    free, total = torch.cuda.mem_get_info(device)
    # Memory that torch keeps for this process, as after an engine that was destroyed.
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if free < needed:
        raise OutOfDeviceMemory(
            f"{device} has {_gib(free)} free of {_gib(total)}, and weights, gradients and moments of a rank need "
            f"{_gib(needed)}; end the process that fills it, name other devices (placement in a recipe, devices of an "
            "EngineGroup, CUDA_VISIBLE_DEVICES), or spread the model over more ranks (layout)"
        )


def _gib(size: float) -> str:
    return f"{size / 2**30:,.1f} GiB"
