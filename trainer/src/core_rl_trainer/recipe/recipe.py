"""The recipe: everything that ``core-rl train`` needs to know, read from one YAML file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from core_rl.backend.meta import SyncMethod
from core_rl.config.base import Config, parse_config
from core_rl.config.engine import DType, LoraConfig, OptimizerConfig
from core_rl.config.hub import local_model_path
from core_rl.config.layout import ParallelLayout
from core_rl.config.loading import apply_overrides, load_yaml
from core_rl.config.secret import literal_secrets
from core_rl.errors import ConfigError, raise_all
from core_rl_trainer.algorithms.interface import ModelInterfaceAbstraction

__all__ = [
    "CriticSection",
    "DataSection",
    "KeepBest",
    "ModelSection",
    "PlacementSection",
    "Recipe",
    "RewardModelSection",
    "RolloutSection",
    "WandbSection",
    "load_recipe",
]

RELATIVE = "it is relative to the working directory; see the head of the recipe for what prepares it"
"""The hint for a path that does not exist."""
Device = Annotated[int, Field(ge=0)]
"""The number of a device of this machine."""


class ModelSection(Config):
    """The model that is trained."""

    path: str
    """A directory in Hugging Face format with its tokenizer, or a Hub id ``organization/name[@revision]``."""
    lora: LoraConfig | None = None
    """Train an adapter instead of the weights; the reference is then the same model with its adapter off."""


class RolloutSection(Config):
    """The generation of completions."""

    engine: str = "reference-rollout"
    """The inference engine."""
    prompts_per_step: int = Field(default=16, ge=1)
    """Prompts of one training step."""
    group_size: int = Field(default=8, ge=1)
    """Completions of each prompt; GRPO compares their rewards with each other."""
    max_new_tokens: int = Field(default=64, ge=1)
    """The most tokens of one completion."""
    temperature: float = Field(default=1.0, gt=0.0)
    """Of the sampling, and of the log-probs that the train engine computes."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Draw from the smallest set of tokens with this probability; 1 keeps all."""
    top_k: int | None = Field(default=None, ge=1)
    """Draw from this many of the most likely tokens; null keeps all."""
    timeout_s: float = Field(default=600.0, gt=0.0)
    """The time limit of the completions of one batch of prompts, in seconds."""
    sync: SyncMethod = "disk"
    """How new weights reach the rollout engine: in files below ``output_dir``, through shared memory (``tensor``), or
    over a process group with the ranks of its servers (``distributed``). ``lora`` sends the adapter of ``model.lora``
    alone; the others send weights with an adapter merged into them."""
    max_head_offpolicyness: int = Field(default=0, ge=0)
    """0 trains synchronously: completions come from the newest weights. Above 0 it trains asynchronously: the next
    completions are generated meanwhile, from weights that are at most this many versions older."""
    max_concurrent_rollouts: int = Field(default=256, ge=1)
    """Prompts that are completed at one time."""
    should_accept: str | None = None
    """``module:function`` or ``file.py:function``, called with the batch of one prompt's completions. False replaces
    them by those of another prompt. ``core_rl_trainer.rewards.functions:rewards_differ`` leaves out groups without
    a signal, as DAPO (arXiv:2503.14476) does."""
    reward_timeout_s: float | None = Field(default=None, gt=0.0)
    """The time limit of the reward of one completion, in seconds; null for none."""
    reward_processes: int = Field(default=0, ge=0)
    """Compute rewards in this many processes, where one that takes longer than ``reward_timeout_s`` is killed;
    0 computes them in threads, where it is only given up."""
    environment: str | None = None
    """``module:function`` or ``file.py:function``, called with the tokenizer for each episode: makes the
    `Environment` that replies to the model between its turns, such as a `ToolEnvironment`. Null: one turn."""
    max_turns: int = Field(default=4, ge=1)
    """With an environment: the most completions of one episode."""
    step_timeout_s: float | None = Field(default=None, gt=0.0)
    """With an environment: the time limit of one of its replies, in seconds; null for none."""

    @model_validator(mode="after")
    def _killed_when(self) -> Self:
        if self.reward_processes and self.reward_timeout_s is None:
            raise ValueError("reward_processes needs reward_timeout_s: after how long a process is killed")
        return self


class CriticSection(Config):
    """The critic of PPO: an engine of the same kind as the actor's, with a value head."""

    path: str | None = None
    """The directory that it starts from, by default the actor's; a value head that is missing there is drawn."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Settings of the interface ``ppo_critic``."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Its own optimizer."""
    layout: ParallelLayout | None = None
    """Its own parallel degrees, by default the actor's."""


class RewardModelSection(Config):
    """A reward model whose scores are added to the rewards: an engine of the same kind as the actor's."""

    path: str
    """A local directory of a model with a reward head, as a ``reward_model`` run writes it."""
    weight: float = 1.0
    """What scores are multiplied with."""
    layout: ParallelLayout | None = None
    """Its own parallel degrees, by default the actor's."""


class PlacementSection(Config):
    """The device numbers of each role's ranks, in rank order; by default every role begins at device 0."""

    actor: tuple[Device, ...] | None = None
    """Devices of the actor."""
    critic: tuple[Device, ...] | None = None
    """Devices of the critic."""
    reference: tuple[Device, ...] | None = None
    """Devices of the reference."""
    reward: tuple[Device, ...] | None = None
    """Devices of the reward model."""


class DataSection(Config):
    """The data: JSONL files, or datasets that ``datasets.save_to_disk`` wrote.

    Examples for rollouts have a ``prompt`` (a text, or chat messages) and whatever the reward function reads; those for
    ``sft`` an ``answer`` besides, or ``messages`` alone; those for ``reward_model`` and ``dpo`` the completions
    ``chosen`` and ``rejected``.
    """

    train: str
    """Examples to train on."""
    eval: str
    """Examples for evaluation."""
    batch_size: int = Field(default=16, ge=1)
    """Examples of one training step where nothing is rolled out."""
    too_long: Literal["refuse", "drop"] = "refuse"
    """The treatment of examples that are longer than the model's context, counting ``rollout.max_new_tokens`` where
    there are rollouts: an error that names them, or a warning that counts them."""


class KeepBest(Config):
    """The rule for the best evaluation."""

    metric: str = Field(pattern="^eval_")
    """A metric of evaluations, such as ``eval_reward`` or ``eval_loss``."""
    mode: Literal["max", "min"]
    """Whether more of it is better, or less."""


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


class Recipe(Config):
    """The config of a run. Relative paths start at the working directory."""

    engine: str
    """The train engine."""
    engines: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """A section for each engine that needs one, with fields of that engine's config such as ``layout`` and
    ``options``; ``core-rl engines show NAME`` lists them. An engine without a section has one rank."""
    model: ModelSection
    """The model that is trained; a frozen copy of it is the reference, where the algorithm has one."""
    dtype: DType = "float32"
    """Compute dtype of all engines."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """``auto``: CUDA where there is a device, else the CPU."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer; a decaying schedule ends at ``steps``."""
    micro_batch_tokens: int = Field(default=8192, ge=1)
    """The most tokens of one forward pass on one data-parallel rank."""
    rollout: RolloutSection = RolloutSection()
    """The generation of completions."""
    algorithm: ModelInterfaceAbstraction = ModelInterfaceAbstraction("ppo_actor")
    """The model interface, and its settings in ``args``."""
    data: DataSection
    """The data."""
    reward: str | None = "core_rl_trainer.rewards.text:text_match"
    """``module:function`` or ``file.py:function``, called with the completion's text and the line of the JSONL file.
    With an environment, the last completion is scored, and null leaves the rewards to the environment; null also where
    a reward model alone decides."""
    critic: CriticSection | None = None
    """The critic, where the algorithm has one (``ppo``)."""
    reward_model: RewardModelSection | None = None
    """A reward model."""
    placement: PlacementSection = PlacementSection()
    """The devices of each role."""
    colocated: bool = False
    """Roles share their devices: each is offloaded to host memory while another one works. Those with the same layout
    on the same devices live in the same processes. One whose ``placement`` names devices of its own stays there."""
    call_timeout_s: float = Field(default=600.0, gt=0.0)
    """The time limit of each call of a train engine, in seconds: building it, one update over its batch, one save. Its
    ranks wait as long for each other. A call that exceeds it ends the run. It may change when a run is resumed."""
    steps: int = Field(ge=1)
    """Training steps; each ends with new weights in the rollout engine."""
    save_every: int = Field(default=10, ge=1)
    """Steps between run checkpoints; the last step always has one."""
    keep: int = Field(default=2, ge=1)
    """Run checkpoints that are kept."""
    keep_best: KeepBest | None = None
    """Keep the model of the best evaluation as ``best_model``, next to the checkpoints, in Hugging Face format."""
    wandb: WandbSection | None = None
    """Show the metrics in Weights & Biases as well."""
    eval_every: int = Field(default=0, ge=0)
    """Steps between evaluations on the evaluation prompts; 0: only before and after the training."""
    eval_samples: int = Field(default=1, ge=1)
    """Sampled completions of each evaluation prompt, in addition to the greedy one."""
    seed: int = Field(default=0, ge=0)
    """Of the data order and of the sampling."""
    output_dir: str
    """The directory of all files of the run; ``{engine}`` and ``{seed}`` stand for the values of those fields."""
    fresh: bool = False
    """Start over: delete what an earlier run wrote to ``output_dir``."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        own = self.algorithm.args.get("temperature", self.rollout.temperature)
        if own != self.rollout.temperature:
            raise ValueError(
                f"algorithm.args.temperature = {own} and rollout.temperature = {self.rollout.temperature}: log-probs "
                "would be of another distribution than the completions; leave the former out"
            )
        if self.keep_best is not None and not self.eval_every:
            raise ValueError("keep_best compares evaluations; set eval_every above 0")
        if self.reward is None and self.reward_model is None and self.rollout.environment is None:
            raise ValueError(
                "reward = null needs a rollout.environment that gives the rewards, or a reward_model"
            )
        return self

    @property
    def directory(self) -> Path:
        """``output_dir`` as a path."""
        return Path(self.output_dir)


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read ``path`` and apply dotted ``overrides``.

    Raises `ConfigError` with every field that is wrong, its value unless that is a secret, and the fix.
    """
    values = apply_overrides(load_yaml(path), overrides)
    raise_all(ConfigError, str(path), literal_secrets(values))
    recipe = parse_config(Recipe, values, str(path))
    try:
        directory = recipe.output_dir.format(engine=recipe.engine, seed=recipe.seed)
    except (KeyError, IndexError, ValueError) as error:
        raise ConfigError(
            f"{path}: field 'output_dir' = {recipe.output_dir!r}: only {{engine}} and {{seed}} can stand in braces"
        ) from error
    recipe = recipe.model_copy(update={"output_dir": directory})
    missing = [
        f"field 'data.{name}' = {file!r}: there is no such file; {RELATIVE}"
        for name, file in (("train", recipe.data.train), ("eval", recipe.data.eval))
        if not Path(file).exists()
    ]
    raise_all(ConfigError, str(path), missing)  # before a model is downloaded
    return _with_local_models(recipe, str(path))


def _with_local_models(recipe: Recipe, origin: str) -> Recipe:
    """``recipe`` with the directories of its models; raises one `ConfigError` for those that are not found."""
    sections: dict[str, Any] = {}
    problems: list[str] = []
    for name in ("model", "critic", "reward_model"):
        section = getattr(recipe, name)
        if section is None or section.path is None:
            continue
        try:
            path = local_model_path(section.path, field=f"{name}.path")
            sections[name] = section.model_copy(update={"path": path})
        except ConfigError as error:
            problems.append(f"{error}; {RELATIVE}")
    raise_all(ConfigError, origin, problems)
    return recipe.model_copy(update=sections)
