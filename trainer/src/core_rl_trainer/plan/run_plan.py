"""`RunPlan`: everything that follows from a recipe, resolved once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from core_rl.config.engine import EngineConfig, InferenceEngineConfig, OptimizerConfig, TrainEngineConfig
from core_rl.launch.hosts import Slot
from core_rl.registry.spec import EngineSpec
from core_rl_trainer.data.training_data import DataSummary, TrainingData
from core_rl_trainer.interface_abstraction import ModelInterfaceAbstraction
from core_rl_trainer.plan.identity import RunIdentity
from core_rl_trainer.recipe.cluster import ClusterSection
from core_rl_trainer.workflows.user_code import LoadedCode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from core_rl_trainer.recipe.recipe import Recipe

ConfigT_co = TypeVar("ConfigT_co", bound=EngineConfig, covariant=True)

TRAINED = ("model", "actor", "critic")
"""Roles whose state a checkpoint holds."""


@dataclass(frozen=True, kw_only=True)
class EnginePlan(Generic[ConfigT_co]):
    """The engine of one role."""

    spec: EngineSpec
    config: ConfigT_co
    slots: tuple[Slot, ...]
    """In rank order. Of a rollout engine, the ranks of all servers, where the recipe places them; else empty."""
    colocated_with: str | None = None
    """The role in whose processes the engine lives; None for processes of its own."""
    offloaded: bool = False
    """Whether the engine leaves its devices to other roles between its calls."""

    @property
    def machines(self) -> tuple[int, ...]:
        """The machines with ranks, in order."""
        return tuple(dict.fromkeys(slot.machine for slot in self.slots))

    @property
    def devices(self) -> tuple[int, ...]:
        """The devices on each machine, in order."""
        return tuple(dict.fromkeys(slot.device for slot in self.slots))


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Upper bounds on examples, sequences and tokens of each training step."""

    examples: int
    """Examples to train on."""
    held_out: int
    """Examples for evaluation."""
    examples_per_step: int
    sequences_per_example: int
    longest: int
    """Tokens of the longest sequence, the completion included."""
    largest_unit: int
    """Tokens of the largest unit, which stays in one micro-batch: the longest sequence, or the longest pair."""
    updates_per_step: int = 1
    """Optimizer steps of the actor."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Training steps, and the steps between evaluations and checkpoints; 0 is never."""

    steps: int
    evaluates_first: bool
    """Also before the first step."""
    eval_every: int
    save_every: int
    save_portable_every: int
    save_in_background: bool
    optimizer: OptimizerConfig
    """Optimizer of the trained model, with its learning-rate schedule."""


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """The directory of the run, and the checkpoints that it keeps or starts from."""

    directory: Path
    fresh: bool
    """Delete the files of an earlier run first."""
    keep: int
    """Run checkpoints that are kept."""
    checkpoint_url: str | None
    resume_from: str | None


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """A recipe with everything that follows from it: engines, data, schedule and files."""

    recipe: Recipe
    """With the ``steps`` of its ``epochs`` and the time of its chat templates; a resumed run compares it."""
    algorithm: ModelInterfaceAbstraction
    """With the temperature of the rollouts."""
    trainers: Mapping[str, EnginePlan[TrainEngineConfig]]
    """Train engines by role: ``model`` alone, or ``actor`` with ``critic``, ``reference`` and ``reward``. There is no
    ``reference`` where it is the actor with its new adapter off."""
    rollout: EnginePlan[InferenceEngineConfig] | None
    """None for training on data."""
    cluster: ClusterSection
    workload: Workload
    data: TrainingData
    data_summary: DataSummary
    tokenizer: PreTrainedTokenizerBase
    end_tokens: Mapping[int, str]
    """Texts of the tokens that end a sequence, by id."""
    code: LoadedCode | None
    """Rewards, environment and filter of the rollouts."""
    batch_size: int
    """Examples of a training step."""
    schedule: Schedule
    files: RunFiles
    remarks: tuple[str, ...] = ()
    """Settings that are probably not meant."""

    @property
    def engines(self) -> dict[str, EnginePlan[EngineConfig]]:
        """All roles, by name."""
        rollout = {} if self.rollout is None else {"rollout": self.rollout}
        return {**self.trainers, **rollout}

    @property
    def trained(self) -> dict[str, EnginePlan[TrainEngineConfig]]:
        """The roles whose state a checkpoint holds."""
        return {name: self.trainers[name] for name in TRAINED if name in self.trainers}

    @property
    def serves_on_machines(self) -> bool:
        """Whether rollout servers run on machines of the cluster, instead of the driver's."""
        return self.recipe.placement.serves_on_machines(self.cluster)

    @property
    def trains_adapter(self) -> bool:
        """Whether an adapter is trained instead of the weights."""
        return any(plan.config.model.lora is not None for plan in self.trained.values())

    def identity(self) -> RunIdentity:
        """The identity of the run, which takes a read of all data and image files."""
        return RunIdentity.of(self.recipe, self.data.digests())
