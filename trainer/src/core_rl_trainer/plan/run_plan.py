"""A run whose recipe has been checked and whose data is read, before any engine starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from core_rl.checkpoint.run import RunCheckpoint
from core_rl.config.engine import EngineConfig
from core_rl.launch.hosts import Hosts
from core_rl.registry.spec import EngineSpec
from core_rl_trainer.data.statistics import DataStatistics
from core_rl_trainer.logs.samples import Evaluation
from core_rl_trainer.recipe.placement import RankSlot
from core_rl_trainer.recipe.recipe import Recipe

if TYPE_CHECKING:
    from core_rl_trainer.run.run_directory import RunDirectory

__all__ = ["Loop", "Placement", "PreparedRun", "Workload"]


class Loop(Protocol):
    """The operations of a run on its engines."""

    start_phase: str
    """The work of `start`, for the progress of the run."""

    def start(self) -> None:
        """Prepare the first step."""

    def step(self, step: int) -> dict[str, float]:
        """Train one step; returns its metrics."""

    def evaluate(self) -> Evaluation:
        """Evaluate on the evaluation data."""

    def save_model(self, path: Path) -> None:
        """Write the model in Hugging Face format."""

    def save_adapter(self, path: Path) -> None:
        """Write the adapter that is trained, in the layout of ``peft``."""

    def parts(self, *, portable: bool, background: bool) -> dict[str, Callable[[Path], None]]:
        """Writers, by name, of the parts of a run checkpoint that are not in `state_dict`.

        With ``portable`` some of them are for engines of another kind or layout. In the ``background``, files are still
        to come when a writer returns.
        """

    def wait_for_parts(self) -> None:
        """Return when no part is being written in the background, or raise its error."""

    def state_dict(self) -> dict[str, Any]:
        """The rest of a run checkpoint, as JSON."""

    def restore(self, checkpoint: RunCheckpoint) -> None:
        """Resume from ``checkpoint``."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Examples, sequences and tokens of each training step, at most."""

    examples: int
    """Examples to train on."""
    held_out: int
    """Examples for evaluation."""
    examples_per_step: int
    sequences_per_example: int
    longest: int
    """Tokens of the longest sequence, the completion included."""
    largest_unit: int
    """Tokens of the most that stays in one micro-batch: the longest sequence, or the longest pair."""
    updates_per_step: int = 1
    """Optimizer steps of the actor."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The machines and devices of the ranks of a role."""

    slots: tuple[RankSlot, ...]
    """Of each rank, in rank order."""
    colocated_with: str | None = None
    """The role in whose processes this one's engine lives; null where it has processes of its own."""


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """Recipe, engines by role, placements, workload, and the function that opens the engines in a run directory."""

    recipe: Recipe
    """With ``steps``, also where it was written with ``epochs``."""
    roles: Mapping[str, tuple[EngineSpec, EngineConfig]]
    placements: Mapping[str, Placement]
    """Of the train roles, and of the rollout engine where the recipe gives one."""
    workload: Workload
    data: DataStatistics
    end_tokens: Mapping[int, str]
    """Texts of the tokens that end a sequence, by id."""
    open: Callable[[RunDirectory, Hosts], AbstractContextManager[Loop]]
    memory_sender: int | None = None
    """The machine from which weights go through shared memory (``tensor``); None where they go otherwise."""

    def machines(self) -> dict[str, tuple[int, ...]]:
        """By train role, the machines with its ranks."""
        return {
            name: tuple(dict.fromkeys(slot.machine for slot in placement.slots))
            for name, placement in self.placements.items()
            if name != "rollout"
        }

    def engines(self) -> dict[str, str]:
        """By role, the name of its engine."""
        return {name: spec.name for name, (spec, _) in self.roles.items()}

    def trained(self) -> dict[str, tuple[EngineSpec, EngineConfig]]:
        """The roles whose state a checkpoint holds."""
        return {name: self.roles[name] for name in ("model", "actor", "critic") if name in self.roles}
