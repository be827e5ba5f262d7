"""The config of the engine `ddp`."""

from __future__ import annotations

from pydantic import Field

from core_rl.config.base import Config
from core_rl.config.engine import TrainEngineConfig


class DDPOptions(Config):
    """Options of this engine alone."""

    bucket_bytes: int = Field(default=25 * 2**20, ge=1)
    """Gradients are added up over ranks together up to this size, in bytes."""


class DDPConfig(TrainEngineConfig):
    """The common config and the engine's own section."""

    options: DDPOptions = DDPOptions()
