"""Asynchronous copies from the CPU to an accelerator."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` on ``device``. CUDA takes it from pinned memory: of other memory, a copy waits for all that is queued
    on the GPU.
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
