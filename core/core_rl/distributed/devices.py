"""The device of this process: which one it is, and making it the current one. Asking changes nothing."""

from __future__ import annotations

import os

import torch

from core_rl.errors import ConfigError

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables with torch's settings of CUDA memory."""


def device_type(choice: str) -> str:
    """``cpu`` or ``cuda``, for a config's ``device``. Raises `ConfigError` where there is none."""
    available = torch.cuda.is_available()
    if choice == "cuda" and not available:
        raise ConfigError("device = 'cuda', and torch sees no CUDA device; set device to 'cpu' or 'auto'")
    return "cuda" if available and choice != "cpu" else "cpu"


def wants_cuda(choice: str) -> bool:
    """Whether a config's ``device`` needs CUDA where it runs, which may be another machine than this one."""
    return choice == "cuda" or (choice == "auto" and torch.cuda.is_available())


def chosen_device(choice: str, index: int | None = None) -> torch.device:
    """The device of a config's ``device``: on CUDA the one with this ``index``, or else the current one.

    Raises `ConfigError` where the machine has fewer.
    """
    if device_type(choice) == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    index = torch.cuda.current_device() if index is None else index
    if index >= count:
        raise ConfigError(
            f"a rank is to use the CUDA device {index}, and this machine has {count}, numbered from 0; start fewer "
            "ranks, or name its devices (devices of an EngineGroup)"
        )
    return torch.device("cuda", index)


def use_device(device: torch.device) -> None:
    """Make ``device`` the default of CUDA kernels and collectives of this process use.

    Its memory comes in segments that grow (``expandable_segments``), unless the environment chooses: micro-batches of
    many sizes would leave pieces between them that no tensor fits into.
    """
    if device.type != "cuda":
        return
    if not any(os.environ.get(name) for name in ALLOCATOR_VARIABLES):
        # Not by the environment, which servers inherit that cannot release such memory.
        expand_segments(True)
    torch.cuda.set_device(device)


def expand_segments(on: bool) -> None:
    """Choose, for this process, whether the next memory on CUDA comes in segments that grow."""
    torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{on}")


def segments_expand() -> bool:
    """Whether `expand_segments` or the environment chose so."""
    if hasattr(torch._C, "_accelerator_getAllocatorSettings"):
        return "expandable_segments:True" in torch._C._accelerator_getAllocatorSettings()
    # torch 2.11 has no such function: as `use_device` decides.
    settings = [os.environ[name] for name in ALLOCATOR_VARIABLES if os.environ.get(name)]
    return all("expandable_segments:True" in setting for setting in settings)


def give_back_cache(device: torch.device) -> None:
    """Give freed memory, which torch keeps for itself, back to ``device``."""
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()
