"""The recipe: everything that ``core-rl train`` needs to know, read from one YAML file."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from fractions import Fraction
from math import ceil
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

from pydantic import BaseModel, Field, model_validator

from core_rl.config.base import Config, parse_config
from core_rl.config.engine import DType, OptimizerConfig
from core_rl.config.hub import local_model_path
from core_rl.config.loading import apply_overrides, load_yaml
from core_rl.config.paths import ImportPath, LocalPath, absolute_path
from core_rl.config.secret import SecretReference, literal_secrets
from core_rl.errors import ConfigError, raise_all
from core_rl_trainer.data.config import DataSection
from core_rl_trainer.data.sources import is_missing
from core_rl_trainer.interface_abstraction import ModelInterfaceAbstraction
from core_rl_trainer.logs.metrics_log import WandbSection
from core_rl_trainer.outputs.push import HubSection
from core_rl_trainer.recipe.cluster import ClusterSection, PlacementSection
from core_rl_trainer.recipe.rollout import RolloutSection
from core_rl_trainer.recipe.sections import (
    CriticSection,
    DoctorSection,
    KeepBest,
    ModelSection,
    RewardModelSection,
    StopSection,
    TimeoutsSection,
)
from core_rl_trainer.rewards.config import ENVIRONMENT, REWARD_MODEL, RewardSection

__all__ = ["HERE", "Recipe", "RecipeSource", "load_recipe", "plain_values", "with_local_models"]

HERE = "{here}"
"""Stands in ``output_dir`` for the directory of the recipe's file."""

RELATIVE = "it is relative to the working directory; see the head of the recipe for what prepares it"
"""The hint for a path that does not exist."""
PATTERN = "patterns are not read: name the directory of the files, or a list of them"
STEP_EXAMPLES = "data.batch_size, or rollout.prompts_per_step: examples of a step on all ranks together"
NAMES_ELSEWHERE = {
    "optimizer.lr": "learning_rate",
    "optimizer.schedule": "lr_scheduler_type",
    "optimizer.schedule.warmup_steps": "warmup_steps warmup_ratio",
    "epochs": "num_train_epochs num_epochs total_epochs",
    "steps": "max_steps",
    STEP_EXAMPLES: "per_device_train_batch_size train_batch_size micro_batch_size gradient_accumulation_steps",
    "dtype": "bf16 fp16 torch_dtype",
    "model.path": "model_name_or_path base_model",
    "model.lora.rank": "r lora_r lora_rank",
    "model.lora.alpha": "lora_alpha",
    "model.lora.dropout": "lora_dropout",
    "model.lora.target_modules": "lora_target lora_target_modules",
    "model.lora.path": "adapter_name_or_path lora_model_dir",
    "data.train": "dataset datasets dataset_name train_files",
    "rollout.group_size": "num_generations n_samples_per_prompt",
    "rollout.max_new_tokens": "max_completion_length max_response_length",
    "rewards": "reward_funcs custom_reward_function",
    "algorithm.args.kl_coef, or algorithm.args.beta of dpo": "beta",
    "save_every": "save_steps",
    "eval_every": "eval_steps",
    "eval_first": "eval_on_start val_before_train",
    "keep": "save_total_limit",
    "wandb": "report_to",
}
OTHER_NAMES = {name: place for place, names in NAMES_ELSEWHERE.items() for name in names.split()}
"""Fields by their names in transformers, TRL, LLaMA-Factory, axolotl and verl."""


class Recipe(Config):
    """The config of a run. Relative paths start at the working directory."""

    other_names = OTHER_NAMES

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
    share_prefixes: bool = True
    """Compute tokens that samples share at their beginning, as the prompt of a group, once in a forward pass, where the
    engines can. ``micro_batch_tokens`` counts them once."""
    rollout: RolloutSection = RolloutSection()
    """The generation of completions."""
    algorithm: ModelInterfaceAbstraction = ModelInterfaceAbstraction("ppo_actor")
    """The model interface, and its settings in ``args``."""
    data: DataSection
    """The data."""
    reward: ImportPath | None = "core_rl_trainer.rewards.text:text_match"
    """``module:function`` or ``file.py:function``, called with the completion's text and the line of the JSONL file; or
    the ``http://`` address of an endpoint. With an environment, the last completion is scored, and null leaves the
    rewards to the environment; null also where a reward model alone decides."""
    rewards: tuple[RewardSection, ...] = ()
    """Several rewards instead of one, whose weighted sum is trained on."""
    critic: CriticSection | None = None
    """The critic, where the algorithm has one (``ppo``)."""
    reward_model: RewardModelSection | None = None
    """A reward model."""
    cluster: ClusterSection = ClusterSection()
    """The machines."""
    placement: PlacementSection = PlacementSection()
    """The machines and devices of each role."""
    colocated: bool = False
    """Roles share their devices: each is offloaded to host memory while another one works. Roles with the same layout
    on the same devices live in the same processes. One whose ``placement`` names devices of its own stays there."""
    timeouts: TimeoutsSection = TimeoutsSection()
    """Time limits of calls and of ranks. They may change when a run is resumed; limits of rollouts and rewards are in
    ``rollout``."""
    steps: int = Field(default=0, ge=1)
    """Training steps; each ends with new weights in the rollout engine. More of them extend a run, also a finished
    one. Needed, unless there are ``epochs``."""
    epochs: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Passes over the examples of ``data.train``, instead of ``steps``, which follow from it when the data is read. The
    last step is a whole one."""
    save_every: int = Field(default=10, ge=1)
    """Steps between run checkpoints; the last step always has one."""
    save_portable_every: int = Field(default=0, ge=0)
    """Steps between run checkpoints that hold the models and their moments in the format ``portable`` as well, from
    which a run under another engine or layout starts (``resume_from``); the last step has one then. 0: none."""
    save_in_background: bool = True
    """Train on while the files of a run checkpoint are written, from a copy of weights and moments in host memory. It
    is in place after the next step, or earlier; a run that is killed before resumes from the previous checkpoint."""
    keep: int = Field(default=2, ge=1)
    """Run checkpoints that are kept."""
    checkpoint_url: str | None = Field(default=None, pattern=r"^[a-z0-9+.-]+://.+$")
    """Copy each run checkpoint to this fsspec URL as well, such as ``s3://bucket/my-run``, where ``keep`` of them are
    kept. A run without its ``output_dir`` resumes from there. It may change when a run is resumed."""
    keep_best: KeepBest | None = None
    """Keep the model of the best evaluation as ``best_model``, next to the checkpoints, in Hugging Face format."""
    wandb: WandbSection | None = None
    """Show the metrics in Weights & Biases as well."""
    push_to_hub: HubSection | None = None
    """Upload the model of the complete run to the Hugging Face Hub. It may change when a run is resumed: a complete
    run is uploaded then."""
    callbacks: tuple[ImportPath, ...] = ()
    """Functions of the events of the run (`core_rl_trainer.callbacks`), or classes of them: each a name that an
    installed distribution declares, ``module:name`` or ``file.py:name``."""
    eval_every: int = Field(default=0, ge=0)
    """Steps between evaluations on the evaluation prompts; 0: only before and after the training."""
    eval_first: bool | None = None
    """Evaluate before the first step. By default where that computes at most three times as much as a step."""
    eval_samples: int = Field(default=1, ge=1)
    """Sampled completions of each evaluation prompt, in addition to the greedy one."""
    seed: int = Field(default=0, ge=0)
    """Seed of the data order and of the sampling."""
    output_dir: str
    """The directory of all files of the run; ``{engine}`` and ``{seed}`` stand for the values of those fields, and
    ``{here}`` for the directory of the recipe."""
    resume_from: LocalPath | None = None
    """Start from a checkpoint of another run: the directory of that run, whose last checkpoint it is, or of one
    checkpoint. Engine, layout and optimizer may be others; model, data and seed are the same."""
    stop_on: StopSection = StopSection()
    """Rules that end a run without learning."""
    doctor: DoctorSection | None = None
    """Judge the train and the rollout engine while they run; a warning names a wrong engine. By default never."""
    fresh: bool = False
    """Start over: delete the files of an earlier run in ``output_dir``."""

    @model_validator(mode="before")
    @classmethod
    def _plain(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        values = plain_values(values)
        if not values.get("rewards"):
            return values
        if values.get("reward") is not None:
            raise ValueError("both 'reward' and 'rewards' are set; put all of them into 'rewards'")
        return values | {"reward": None}

    @model_validator(mode="after")
    def _has_one_length(self) -> Self:
        if self.epochs is None and not self.steps:
            raise ValueError(
                "missing field 'steps' (or 'epochs'): set the number of training steps, or of passes"
            )
        if self.epochs is None:
            return self
        if self.steps:
            raise ValueError(f"steps = {self.steps} and epochs = {self.epochs:g}: leave either out")
        if any(source.weight is not None for source in self.data.train):
            raise ValueError(
                f"epochs = {self.epochs:g}, and the sources of data.train have weights, by which some are passed over "
                "more often than others; set steps"
            )
        return self

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        temperature = self.algorithm.args.get("temperature", self.rollout.temperature)
        if temperature != self.rollout.temperature:
            raise ValueError(
                f"algorithm.args.temperature = {temperature} and rollout.temperature = {self.rollout.temperature}: "
                "log-probs would be of another distribution than the completions; leave the former out"
            )
        if not self.data.has_evaluation and (
            self.eval_every or self.eval_first or self.keep_best is not None
        ):
            raise ValueError(
                f"eval_every = {self.eval_every}, and there is no evaluation data; set data.eval, or "
                "data.eval_fraction to hold out a share of data.train, or set eval_every=0 and leave eval_first and "
                "keep_best out"
            )
        if self.keep_best is not None and not self.eval_every:
            raise ValueError("keep_best compares evaluations; set eval_every above 0")
        if self.doctor is not None and (self.model.vision or self.rollout.logits_are_changed):
            raise ValueError(
                "doctor judges text models, without rollout.logit_bias and penalties; leave it out here"
            )
        labels = [section.label for section in self.reward_fields.values()]
        labels += [REWARD_MODEL] if self.reward_model is not None else []
        labels += [ENVIRONMENT] if self.rollout.environment is not None else []
        twice = [
            f"{count} rewards are called {label!r}; give each a 'name' of its own"
            for label, count in Counter(labels).items()
            if count > 1
        ]
        if twice:
            raise ValueError("; ".join(twice))
        if not labels:
            raise ValueError(
                "reward = null needs a rollout.environment that gives the rewards, or a reward_model"
            )
        return self

    @property
    def model_directories(self) -> dict[str, str]:
        """Directories of weights, by their fields."""
        sections = {"model": self.model, "critic": self.critic, "reward_model": self.reward_model}
        paths = {name: section.path for name, section in sections.items() if section is not None}
        return {f"{name}.path": path for name, path in paths.items() if path is not None}

    @property
    def engine_fields(self) -> dict[str, Any]:
        """The fields that the configs of all engines share."""
        return {"dtype": self.dtype, "device": self.device, "seed": self.seed}

    @property
    def reward_fields(self) -> dict[str, RewardSection]:
        """The functions of ``reward`` or ``rewards``, by their fields."""
        if self.reward is not None:
            return {"reward": RewardSection(function=self.reward)}
        return {f"rewards.{number}.function": section for number, section in enumerate(self.rewards)}

    def with_steps(self, examples: int, batch_size: int) -> Recipe:
        """The recipe with the ``steps`` of its ``epochs`` over ``examples``; itself where it has steps."""
        if self.epochs is None:
            return self
        steps = ceil(Fraction(str(self.epochs)) * examples / batch_size)
        return self.model_copy(update={"steps": steps, "epochs": None})

    @property
    def directory(self) -> Path:
        """``output_dir`` as a path."""
        return Path(self.output_dir)


RecipeSource: TypeAlias = Path | str | Mapping[str, Any] | Recipe
"""A YAML file by its path, the same values as a mapping, or a recipe built in Python."""


def load_recipe(source: RecipeSource, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in ``source``, with dotted ``overrides``, and with the directories of its models.

    Raises `ConfigError` with every field that is wrong, its value unless that is a secret, and the fix.
    """
    if isinstance(source, str | Path):
        path, values = Path(source), load_yaml(source)
    else:
        path, values = Path("recipe"), plain_values(source)
    values = apply_overrides(values, overrides)
    raise_all(ConfigError, str(path), literal_secrets(values))
    recipe = parse_config(Recipe, values, str(path))
    braces = {"engine": recipe.engine, "seed": recipe.seed, "here": path.parent.absolute()}
    try:  # variables in braces are for absolute_path
        directory = re.sub(r"\$\{(.*?)\}", r"${{\1}}", recipe.output_dir).format(**braces)
    except (KeyError, IndexError, ValueError) as error:
        raise ConfigError(
            f"{path}: field 'output_dir' = {recipe.output_dir!r}: only {{engine}} and {{seed}}, {{here}} for the "
            "directory of the recipe, and variables (${NAME}) can stand in braces"
        ) from error
    try:
        recipe = recipe.model_copy(update={"output_dir": absolute_path(directory)})
    except ValueError as error:
        raise ConfigError(f"{path}: field 'output_dir' = {directory!r}: {error}") from error
    missing = [
        f"field 'data.{name}' = {source.path!r}: there is no such file; "
        + (PATTERN if "*" in source.path else RELATIVE)
        for name, sources in (("train", recipe.data.train), ("eval", recipe.data.eval or ()))
        for source in sources
        if is_missing(source)
    ]
    if "://" in directory:
        missing.append(
            f"field 'output_dir' = {directory!r} is a URL; name a directory (checkpoint_url takes URLs)"
        )
    raise_all(ConfigError, str(path), missing)  # before a model is downloaded
    return with_local_models(recipe, str(path))


def with_local_models(recipe: Recipe, origin: str) -> Recipe:
    """``recipe`` with the directories of its models; raises one `ConfigError` for missing directories."""
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
            problems.append(str(error) if Path(section.path).is_dir() else f"{error}; {RELATIVE}")
    raise_all(ConfigError, origin, problems)
    return recipe.model_copy(update=sections)


def plain_values(value: Any) -> Any:
    """``value`` with sections as mappings, paths as text, and NumPy's numbers as Python's, at any depth."""
    plain = value
    if isinstance(value, BaseModel):
        plain = value.model_dump(mode="json", exclude_unset=True)
    elif isinstance(value, SecretReference | os.PathLike):
        plain = str(value)
    elif is_dataclass(value) and not isinstance(value, type):
        plain = {field.name: plain_values(getattr(value, field.name)) for field in fields(value)}
    elif isinstance(value, Mapping):
        plain = {name: plain_values(item) for name, item in value.items()}
    elif isinstance(value, list | tuple):
        plain = [plain_values(item) for item in value]
    elif isinstance(value, Real) and not isinstance(value, bool):
        plain = int(value) if isinstance(value, Integral) else float(value)
    return plain
