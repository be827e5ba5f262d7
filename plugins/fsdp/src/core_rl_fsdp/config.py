"""The config of the FSDP engine."""

from __future__ import annotations

from core_rl.config.base import Config
from core_rl.config.engine import TrainEngineConfig

__all__ = ["FSDPConfig", "FSDPOptions"]


class FSDPOptions(Config):
    """What only FSDP knows."""

    reshard_after_forward: bool = True
    """Free a block's gathered weights after its forward pass and gather them again in the backward pass:
    less memory, more communication."""
    gradient_checkpointing: bool = False
    """Keep only the input of each block and compute its activations again in the backward pass."""


class FSDPConfig(TrainEngineConfig):
    """The common config and FSDP's own section."""

    options: FSDPOptions = FSDPOptions()
