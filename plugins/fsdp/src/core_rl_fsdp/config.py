"""The config of the FSDP engine."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from core_rl.config.base import Config
from core_rl.config.engine import StateBytes, TrainEngineConfig


class FSDPOptions(Config):
    """Options of FSDP alone."""

    replicas: int = Field(default=1, ge=1)
    """Copies of the sharded weights among the data-parallel ranks (hybrid sharding): 1 shards over all of them;
    the number of machines keeps the gathering of weights inside each."""
    reshard_after_forward: bool = True
    """Free a block's gathered weights after its forward pass and gather them again in the backward pass:
    less memory, more communication."""
    reduce_scatter: Literal["each", "last"] = "each"
    """Reduce gradients after each micro-batch, or only after the last one of a pass: less communication, and a
    whole float32 gradient on each rank until then."""
    flash_attention: Literal[2, 3] = 2
    """The version of FlashAttention on CUDA: torch's own, or 3, faster on H100 and H200, where it is installed."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """The dtype in which gradients are added up over ranks. bfloat16 halves the traffic and rounds each sum to 8 bits:
    no check allows that much."""
    gradient_checkpointing: bool = False
    """Keep only the input of each block and compute its activations again in the backward pass."""
    compile: bool = False
    """Compile each block with `torch.compile`: the first steps take long, later ones are faster. Needs a C++
    compiler on the CPU."""
    activation_offload: bool = False
    """Keep activations in host memory between the forward and the backward pass: less memory, more traffic. With
    ``gradient_checkpointing``, these are the inputs of the blocks."""


class FSDPConfig(TrainEngineConfig):
    """The common config and FSDP's own section."""

    options: FSDPOptions = FSDPOptions()

    def state_bytes(self, parameters: int, trained: int) -> StateBytes:
        """In float32 where it is trained, spread over the ranks of one copy (ZeRO-3, arXiv:1910.02054, section 5.3)."""
        ranks = self.layout.world_size / self.options.replicas
        return StateBytes(
            weights=(2 if self.holds_compute_dtype else 4) * parameters / ranks,
            gradients=4 * trained / ranks,
            moments=self.moment_bytes * trained / ranks,
        )

    def gathered_bytes(self, parameters: int, outer: int, layers: int) -> float:
        """In the compute dtype, embeddings and head for the whole pass, and two layers (the next one is on its way) or,
        without `options.reshard_after_forward`, all of them; while one layer's float32 gradients are on their way out.
        """
        layer = (parameters - outer) / layers
        gathered = min(2, layers) if self.options.reshard_after_forward else layers
        leaving = 0.0 if self.optimizer is None else 4 * layer
        return (
            (2 if self.dtype == "bfloat16" else 4) * (outer + gathered * layer) + leaving
        ) / self.layout.tp

    @property
    def recomputes(self) -> bool:
        return self.options.gradient_checkpointing

    @property
    def expert_rows(self) -> int:
        """As `ExpertDispatch` has them."""
        return self.layout.ep
