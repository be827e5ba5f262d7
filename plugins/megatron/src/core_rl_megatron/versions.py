"""Which megatron-core this engine works with."""

from __future__ import annotations

import importlib_metadata as metadata

from core_rl.errors import ConfigError

__all__ = ["check_megatron"]

OLDEST, NEWEST = (0, 16), (0, 16)
"""Versions (major, minor) that the engine is tested with. It looks into the optimizer and the schedules, which
change from one minor version to the next."""


def check_megatron() -> None:
    """Raise `ConfigError` unless megatron-core is there in a version that the engine knows."""
    install = f"pip install 'megatron-core>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}'"
    try:
        version = metadata.version("megatron-core")
    except metadata.PackageNotFoundError as error:
        raise ConfigError(
            f"the engine 'megatron' needs megatron-core, which is not installed: {install}"
        ) from error
    parts = version.split(".")
    known = len(parts) >= 2 and parts[0].isdigit() and parts[1].isdigit()
    if not known or not OLDEST <= (int(parts[0]), int(parts[1])) <= NEWEST:
        raise ConfigError(
            f"the engine 'megatron' knows megatron-core {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}, "
            f"and {version} is installed: {install}"
        )
