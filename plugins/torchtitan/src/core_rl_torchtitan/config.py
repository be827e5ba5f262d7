"""The config of the torchtitan engine."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from core_rl.config.base import Config
from core_rl.config.engine import StateBytes, TrainEngineConfig


class TorchtitanOptions(Config):
    """Settings of torchtitan's own."""

    replicas: int = Field(default=1, ge=1)
    """Copies of the sharded weights among the data-parallel ranks (torchtitan's ``data_parallel_replicate_degree``)."""
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Free gathered weights after the forward pass and gather them again in the backward pass: of all modules, of none,
    or of all but the last, which the backward pass begins with."""


class TorchtitanConfig(TrainEngineConfig):
    """The common config and torchtitan's own section."""

    options: TorchtitanOptions = TorchtitanOptions()

    def state_bytes(self, parameters: int, trained: int) -> StateBytes:
        """In float32, spread over the ranks of one copy (ZeRO-3, arXiv:1910.02054, section 5.3)."""
        ranks = self.layout.world_size / self.options.replicas
        return StateBytes(
            weights=4 * parameters / ranks,
            gradients=4 * trained / ranks,
            moments=self.moment_bytes * trained / ranks,
        )

    def gathered_bytes(self, parameters: int, outer: int, layers: int) -> float:
        """In the compute dtype, embeddings and head, and two layers (with ``"never"`` all of them); while the gradients
        of one layer are on their way out.
        """
        layer = (parameters - outer) / layers
        gathered = layers if self.options.fsdp_reshard_after_forward == "never" else min(2, layers)
        leaving = 0.0 if self.optimizer is None else 4 * layer
        size = 2 if self.dtype == "bfloat16" else 4
        return (size * (outer + gathered * layer) + leaving) / self.layout.tp
