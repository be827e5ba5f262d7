"""A run whose recipe has been checked and whose data is read, before any engine starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from core_rl.checkpoint.run import RunCheckpoint
from core_rl.config.engine import EngineConfig
from core_rl.registry.spec import EngineSpec
from core_rl_trainer.loop.evaluation import Evaluation

if TYPE_CHECKING:
    from core_rl_trainer.loop.run_directory import RunDirectory

__all__ = ["Load", "Loop", "Prepared", "RolePlace"]


class Loop(Protocol):
    """What a run does with its engines."""

    def start(self) -> None:
        """Before the first step."""

    def step(self, step: int) -> dict[str, float]:
        """Train; the metrics of the step."""

    def evaluate(self) -> Evaluation:
        """On the held-out rows."""

    def save_model(self, path: Path) -> None:
        """In Hugging Face format."""

    def parts(self) -> dict[str, Any]:
        """What a run checkpoint holds besides `state_dict`: writers by name."""

    def state_dict(self) -> dict[str, Any]:
        """The rest of it, as JSON."""

    def restore(self, checkpoint: RunCheckpoint) -> None:
        """Go on from there."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """How much comes in each step, at most."""

    rows: int
    """Rows to train on."""
    held_out: int
    rows_per_step: int
    sequences_per_row: int
    longest: int
    """Tokens of the longest sequence, the answer included."""
    updates_per_step: int = 1
    """Optimizer steps of the actor."""


@dataclass(frozen=True, kw_only=True)
class RolePlace:
    """Where the ranks of a train role are."""

    devices: tuple[int, ...]
    """The number of each rank's device."""
    beside: str | None = None
    """The role in whose processes this one's engine lives; null where it has processes of its own."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The engines by role, where their ranks are, their load, and what opens them in a run directory."""

    roles: Mapping[str, tuple[EngineSpec, EngineConfig]]
    places: Mapping[str, RolePlace]
    """Of the train roles."""
    load: Load
    open: Callable[[RunDirectory], AbstractContextManager[Loop]]
