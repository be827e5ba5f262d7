"""A platform of verl for machines without an accelerator, which verl lacks: for tests and small models."""

from __future__ import annotations

from contextlib import nullcontext
from types import ModuleType
from typing import Any

import torch


def register_cpu() -> None:
    """Register the platform ``cpu``, which the variable ``VERL_PLATFORM`` selects.

    Methods that training never calls do nothing.
    """
    # Not at the top: `import verl` loads the plugin, which imports this module.
    from verl.plugin.platform import PlatformBase, PlatformRegistry

    if PlatformRegistry.get("cpu") is not None:
        return
    device_module = _device_module()
    methods: dict[str, Any] = {
        "device_name": property(lambda _: "cpu"),
        "vendor_name": property(lambda _: "cpu"),
        "device_module": property(lambda _: device_module),
        "is_available": lambda _: True,
        "current_device": lambda _: torch.device("cpu"),
        "device_count": lambda _: 1,
        "communication_backend_name": lambda _: "gloo",
        "get_device_capability": lambda *_: (None, None),
        "is_ipc_supported": lambda _: False,
        "nvtx_range": lambda *_: nullcontext(),
        "visible_devices_envvar": lambda _: "NO_DEVICES",
        "ray_resource_name": lambda _: "CPU",
        "ray_noset_envvars": lambda _: [],
        "empty_cache": lambda _: None,
    }
    unused = {name: lambda *_: None for name in PlatformBase.__abstractmethods__ - set(methods)}
    PlatformRegistry.register(platform="cpu")(type("CPUPlatform", (PlatformBase,), methods | unused))


def _device_module() -> ModuleType:
    """`torch.cpu` with functions of `torch.cuda` that verl calls."""
    module = ModuleType("torch.cpu")
    vars(module).update(vars(torch.cpu))
    figures = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")
    vars(module).update({name: lambda *_: 0 for name in figures}, mem_get_info=lambda *_: (0, 0))
    vars(module).update(
        set_rng_state=torch.set_rng_state, get_device_name=lambda *_: "CPU", empty_cache=lambda: None
    )
    return module
