"""The sections ``wandb`` and ``trackio`` of a recipe."""

from __future__ import annotations

from typing import Literal

from core_rl.config.base import Config

__all__ = ["TrackioSection", "WandbSection"]


class WandbSection(Config):
    """A run in Weights & Biases (``pip install wandb``), with the same values as ``metrics.jsonl``."""

    project: str = "core-rl"
    """The project there."""
    entity: str | None = None
    """Its owner; null for the default one."""
    name: str | None = None
    """The run's name there; null for that of ``output_dir``."""
    group: str | None = None
    """Runs that belong together."""
    tags: tuple[str, ...] = ()
    """Words to find it by."""
    mode: Literal["online", "offline"] = "online"
    """``offline`` writes to ``output_dir/wandb``, for ``wandb sync``."""


class TrackioSection(Config):
    """A run in Trackio (``pip install trackio``), with the same values as ``metrics.jsonl``."""

    project: str = "core-rl"
    """The project there."""
    name: str | None = None
    """The run's name there; null for that of ``output_dir``, with an identifier behind it."""
    group: str | None = None
    """Runs that belong together."""
    space_id: str | None = None
    """A Space of the Hugging Face Hub for the dashboard, ``organization/name``; null for this machine."""
