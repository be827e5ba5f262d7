"""The smaller sections of a recipe: models, time limits, best model, stop rules."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from core_rl.config.base import Config
from core_rl.config.engine import LoraConfig, OptimizerConfig
from core_rl.config.layout import ParallelLayout
from core_rl.config.paths import HubPath
from core_rl_trainer.interface_abstraction import ModelInterfaceAbstraction


class ModelSection(Config):
    """The model that is trained."""

    path: HubPath
    """A directory in Hugging Face format with its tokenizer, or a Hub id ``organization/name[@revision]``."""
    vision: bool = False
    """Train the whole of a vision-language model; examples may have ``images``, and ``<image>`` in their texts."""
    frozen: tuple[str, ...] = ()
    """Glob patterns of parameters that are not trained, such as ``*visual.blocks.*``."""
    lora: LoraConfig | None = None
    """Train an adapter instead of the weights; the reference has the adapter of ``path``, or none."""


class CriticSection(Config):
    """The critic of PPO: an engine of the same kind as the actor's, with a value head."""

    path: HubPath | None = None
    """The directory that it starts from, by default the actor's; a value head that is missing there is drawn."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Settings of the interface ``ppo_critic``."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer of the critic."""
    layout: ParallelLayout | None = None
    """Parallel degrees, by default the actor's."""

    @property
    def interface(self) -> ModelInterfaceAbstraction:
        """The interface of the critic."""
        return ModelInterfaceAbstraction("ppo_critic", self.args)


class RewardModelSection(Config):
    """A reward model, an engine of the same kind as the actor's.

    Its scores are added to the rewards of training and evaluations, and logged as ``reward/reward_model``.
    """

    path: HubPath
    """A local directory of a model with a reward head, as a ``reward_model`` run writes it."""
    weight: float = 1.0
    """Factor of the scores."""
    layout: ParallelLayout | None = None
    """Parallel degrees, by default the actor's."""


class TimeoutsSection(Config):
    """Time limits, in seconds. What exceeds one ends the run."""

    call_s: float = Field(default=600.0, gt=0.0)
    """Time limit of each call of a train engine: building it, one update over its batch, one save. Its ranks wait
    as long for each other, in every collective of their process groups."""
    sync_s: float = Field(default=1800.0, gt=0.0)
    """Time limit of a weight sync to the rollout engine."""


class KeepBest(Config):
    """The rule for the best evaluation."""

    metric: str = Field(pattern="^eval_")
    """A metric of evaluations, such as ``eval_reward`` or ``eval_loss``."""
    mode: Literal["max", "min"]
    """Whether more of it is better, or less."""


class DoctorSection(Config):
    """Judgements of the running engines by the suite's float64 oracle, on completions of the run."""

    every: int = Field(default=200, ge=1)
    """Steps between them; the first comes before the updates of step 1."""
    sequences: int = Field(default=2, ge=1)
    """Completions of each."""


Patience = Annotated[bool, Field(strict=True)] | Annotated[int, Field(strict=True, ge=1)]
"""False for never, true for as many steps as the warning takes, or a number of steps in a row."""


class StopSection(Config):
    """Rules that end a run without learning, with an exit code; warnings come in any case."""

    nan: bool = False
    """A loss or a gradient that is not finite."""
    no_signal: Patience = False
    """All advantages 0, for so many steps in a row."""
    skipped: Patience = False
    """Every update skipped, for so many steps in a row."""
