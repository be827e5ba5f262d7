"""Parallel degrees: one vocabulary for all engines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

from pydantic import Field, model_validator

from core_rl.config.base import Config
from core_rl.config.capability import Capability
from core_rl.errors import LayoutError


class ParallelLayout(Config):
    """The parallel degrees of one engine; ``world = dp * tp * pp * cp``."""

    dp: int = Field(default=1, ge=1)
    """Data parallel: ranks that see different sequences."""
    tp: int = Field(default=1, ge=1)
    """Tensor parallel: ranks that share each matrix."""
    pp: int = Field(default=1, ge=1)
    """Pipeline parallel: ranks that hold different layers."""
    cp: int = Field(default=1, ge=1)
    """Context parallel: ranks that hold different parts of each sequence."""
    ep: int = Field(default=1, ge=1)
    """Expert parallel: ranks, among the others, that hold different experts."""
    sequence_parallel: bool = False
    """Shard activations between tensor-parallel regions along the tokens."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.dp * self.tp * self.pp * self.cp

    def coordinates(self, rank: int) -> dict[str, int]:
        """The coordinate of ``rank`` along each degree: tp varies fastest, then cp, dp and pp."""
        position = {}
        for name in ("tp", "cp", "dp", "pp"):
            rank, position[name] = divmod(rank, getattr(self, name))
        return position

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.sequence_parallel and self.tp == 1:
            raise ValueError("sequence_parallel needs tp > 1; raise tp or set sequence_parallel to false")
        if self.world_size % self.ep:
            raise ValueError(f"ep={self.ep} must divide dp*tp*pp*cp={self.world_size}")
        return self

    def __str__(self) -> str:
        degrees = {name: getattr(self, name) for name in ("dp", "tp", "pp", "cp", "ep")}
        text = "".join(f"{name}{degree}" for name, degree in degrees.items() if degree > 1) or "dp1"
        return text + ("sp" if self.sequence_parallel else "")

    def check_world(self, world_size: int) -> None:
        """Raise `LayoutError` unless the degrees multiply to ``world_size``."""
        if self.world_size != world_size:
            raise LayoutError(
                f"layout dp={self.dp} * tp={self.tp} * pp={self.pp} * cp={self.cp} = {self.world_size} "
                f"does not equal the world size {world_size}; change a degree or start {self.world_size} ranks"
            )

    def misfits(self, model: Any) -> Iterator[str]:
        """The numbers in the config of a text ``model`` that tp and ep do not divide, with a remedy for each."""
        sizes = (
            "num_attention_heads",
            "num_key_value_heads",
            "intermediate_size",
            "shared_expert_intermediate_size",
        )
        for name in sizes:
            if getattr(model, name, 0) % self.tp:
                yield f"tp={self.tp} does not divide {name}={getattr(model, name)}; change tp, or use cp"
        rows = -(-model.vocab_size // self.tp)
        if rows * (self.tp - 1) >= model.vocab_size:
            yield f"tp={self.tp} leaves ranks without a row of vocab_size={model.vocab_size}; lower tp"
        experts = getattr(model, "num_experts", None)
        if self.ep > 1 and not experts:
            yield f"ep={self.ep} for a model without experts; set ep to 1"
        elif experts and experts % self.ep:
            yield f"ep={self.ep} does not divide num_experts={experts}; change ep"

    def needed_capabilities(self) -> frozenset[Capability]:
        """The capabilities that an engine must declare to run this layout."""
        needs = {
            Capability.DATA_PARALLEL: self.dp > 1,
            Capability.TENSOR_PARALLEL: self.tp > 1,
            Capability.PIPELINE_PARALLEL: self.pp > 1,
            Capability.CONTEXT_PARALLEL: self.cp > 1,
            Capability.EXPERT_PARALLEL: self.ep > 1,
            Capability.SEQUENCE_PARALLEL: self.sequence_parallel,
        }
        return frozenset(capability for capability, needed in needs.items() if needed)
