"""Model interfaces: an algorithm's steps over an engine, found by name as in ReaLHF and AReaL.

A name is looked up among the interfaces registered in this process, the trainer's, and the
entry points of installed distributions (group ``rl_interfaces``); ``"module:Class"`` names any class.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar

from core_rl.backend.loss import LossSpec
from core_rl.backend.meta import SaveLoadMeta
from core_rl.config.base import Config, parse_config
from core_rl.data.batch import SequenceBatch
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.data.outputs import ModelOutput, OutputName
from core_rl.distributed.comm import Comm
from core_rl.errors import ConfigError
from core_rl.registry.objects import load_object
from core_rl.rollout.workflow import RolloutWorkflow
from core_rl_trainer.algorithms.named import declared, find_object
from core_rl_trainer.interface_abstraction import ModelInterfaceAbstraction

__all__ = [
    "ModelInterface",
    "ModelInterfaceAbstraction",
    "RolloutEngineLike",
    "TrainEngineLike",
    "available_interfaces",
    "interface_class",
    "make_interface",
    "register_interface",
]

_KL_IN_REWARD = {"kl_in": "reward", "kl_estimator": "k1"}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    # GRPO (DeepSeekMath, arXiv:2402.03300): each sequence counts the same. The paper has kl_coef 0.04.
    "grpo": {"loss": {"type": "clipped", "aggregation": "sequence_mean"}},
    # Dr. GRPO (arXiv:2503.20783): no division by standard deviation or length. Set loss.aggregation.fixed_length to
    # the most tokens of a completion.
    "dr_grpo": {
        "advantage": {"type": "dr_grpo"},
        "loss": {"type": "clipped", "aggregation": {"fixed_length": 1024}},
    },
    # DAPO (arXiv:2503.14476): clip-higher, token mean, no groups without signal; `overlong` as the completions need.
    "dapo": {"loss": {"type": "clipped", "clip_high": 0.28}, "drop_equal_groups": True},
    # GSPO (arXiv:2507.18071): ratios and clipping for each sequence.
    "gspo": {"loss": {"type": "gspo"}},
    # CISPO (MiniMax-M1, arXiv:2506.13585): clipped weights, and a gradient for every token.
    "cispo": {"loss": {"type": "cispo"}},
    # RLOO (arXiv:2402.14740): against the others of the group, a completion as one action, KL in the reward.
    "rloo": {**_KL_IN_REWARD, "advantage": {"type": "rloo"}, "loss": {"type": "sequence_clipped"}},
    # REINFORCE++ (arXiv:2501.03262): whitened over the batch, clipped, KL in the reward of each token.
    "reinforce_plus_plus": {**_KL_IN_REWARD, "advantage": {"type": "reinforce_plus_plus"}},
    # ReMax (arXiv:2310.10505): REINFORCE against the greedy completion, KL in the reward.
    "remax": {**_KL_IN_REWARD, "advantage": {"type": "remax"}, "loss": {"type": "reinforce"}},
    # PPO (arXiv:1707.06347) as in InstructGPT (arXiv:2203.02155): GAE with a critic, whitened, KL in the reward.
    "ppo": {**_KL_IN_REWARD, "advantage": {"type": "gae"}, "whiten_advantages": True},
}
"""Algorithms by one word: settings of the PPO actor that a name stands for, before ``args`` change them."""

ALGORITHMS = "core_rl_trainer.algorithms"
BUILT_IN = {
    **dict.fromkeys(PRESETS, f"{ALGORITHMS}.ppo_actor:PPOActorInterface"),
    "dpo": f"{ALGORITHMS}.preferences:DPOInterface",
    "ppo_actor": f"{ALGORITHMS}.ppo_actor:PPOActorInterface",
    "ppo_critic": f"{ALGORITHMS}.ppo_critic:PPOCriticInterface",
    "reward_model": f"{ALGORITHMS}.preferences:RewardModelInterface",
    "sft": f"{ALGORITHMS}.sft:SFTInterface",
}

DataKind = Literal["rollouts", "demonstrations", "preferences"]

ConfigT = TypeVar("ConfigT", bound=Config)


class TrainEngineLike(Protocol):
    """The methods that algorithms use of a `TrainEngine` on one rank, or of an `EngineGroup`.

    It exists so that an algorithm runs on both. Loading, weight sync, versions and the
    learning-rate schedule belong to the training loop and are not part of it.
    """

    def train_batch(
        self, batch: SequenceBatch, loss: LossSpec, mb_spec: MicroBatchSpec
    ) -> dict[str, float]: ...

    def forward(
        self,
        batch: SequenceBatch,
        mb_spec: MicroBatchSpec,
        outputs: tuple[OutputName, ...] = ("logprobs",),
        temperature: float = 1.0,
    ) -> ModelOutput: ...

    def save(self, meta: SaveLoadMeta) -> None: ...


class RolloutEngineLike(Protocol):
    """The one method of an inference engine that algorithms use."""

    def rollout(self, data: Sequence[Mapping[str, Any]], workflow: RolloutWorkflow) -> SequenceBatch: ...


class ModelInterface(ABC, Generic[ConfigT]):
    """An algorithm's steps over an engine. A subclass names its config and implements two of them."""

    config_class: ClassVar[type[Config]]
    """The config that ``args`` of `ModelInterfaceAbstraction` are parsed into."""

    trains_on: ClassVar[DataKind] = "rollouts"
    """The data of `train_step`: rollouts, sequences to imitate, or pairs of them."""

    def __init__(self, config: ConfigT) -> None:
        self.config = config

    @property
    def wanted_fields(self) -> frozenset[str]:
        """Fields that a driver must add to a batch of rollouts or of data before `train_step`."""
        return frozenset()

    @property
    def compares_completions(self) -> bool:
        """True for an algorithm that compares completions of one prompt, and so needs several of them."""
        return False

    def prepare(self, batch: SequenceBatch, comm: Comm | None = None) -> SequenceBatch:
        """``batch`` with what `train_step` and other interfaces of the step need, taken over all of its sequences.

        `train_step` does it by itself for a batch that was not prepared. ``comm`` are the ranks that hold the
        other parts of the batch, where each of them calls this; behind a group there are none.
        """
        return batch

    @abstractmethod
    def train_step(
        self, engine: TrainEngineLike, batch: SequenceBatch, mb_spec: MicroBatchSpec
    ) -> dict[str, float]:
        """Update the engine's weights with the global ``batch``; returns metrics."""

    @abstractmethod
    def inference(
        self, engine: TrainEngineLike, batch: SequenceBatch, mb_spec: MicroBatchSpec
    ) -> SequenceBatch:
        """``batch`` with the engine's own values of its tokens added; no weight changes."""

    def state_dict(self) -> dict[str, Any]:
        """The state of the algorithm itself from step to step, as JSON."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from `state_dict`."""

    def generate(
        self, engine: RolloutEngineLike, data: Sequence[Mapping[str, Any]], workflow: RolloutWorkflow
    ) -> SequenceBatch:
        """The sequences that ``workflow`` makes of each item of ``data`` with the inference engine."""
        return engine.rollout(data, workflow)

    def save(self, engine: TrainEngineLike, path: str, tokenizer_path: str | None = None) -> None:
        """Write the engine's model as a Hugging Face directory, with the tokenizer found at ``tokenizer_path``."""
        engine.save(SaveLoadMeta(path=path, format="hf", with_optimizer=False, tokenizer_path=tokenizer_path))

    def save_adapter(self, engine: TrainEngineLike, path: str, tokenizer_path: str | None = None) -> None:
        """Write the engine's adapter as a directory of ``peft``, with the tokenizer found at ``tokenizer_path``."""
        engine.save(SaveLoadMeta(path=path, format="adapter", tokenizer_path=tokenizer_path))


_registered: dict[str, type[ModelInterface[Any]]] = {}


def register_interface(name: str, cls: type[ModelInterface[Any]]) -> None:
    """Make ``cls`` known as ``name`` in this process. `ConfigError` when another class has the name."""
    _checked(name, cls)
    taken = _registered.get(name, cls)
    if taken is not cls or name in BUILT_IN:
        owner = BUILT_IN.get(name) or f"{taken.__module__}:{taken.__qualname__}"
        raise ConfigError(f"the interface name {name!r} belongs to {owner}; choose another name")
    _registered[name] = cls


def available_interfaces() -> list[str]:
    """All names that `make_interface` knows."""
    return sorted({*_registered, *BUILT_IN, *(point.name for point in declared())})


def make_interface(abstraction: ModelInterfaceAbstraction) -> ModelInterface[Any]:
    """The interface that ``abstraction`` names, with its config.

    Raises `ConfigError` for an unknown, ambiguous or broken name and for settings it does not take.
    """
    name = abstraction.type
    preset = PRESETS.get(name, {})
    values = {**preset, **abstraction.args}
    for section in ("advantage", "loss"):
        changes = abstraction.args.get(section)
        if isinstance(changes, Mapping) and "type" not in changes:
            values[section] = {**preset.get(section, {}), **changes}
    cls = interface_class(name)
    return cls(parse_config(cls.config_class, values, f"interface {name!r}"))


def interface_class(name: str) -> type[ModelInterface[Any]]:
    """The class that ``name`` stands for; raises as `make_interface` does."""
    if name not in _registered and name not in BUILT_IN:
        return _checked(name, find_object("interface", name, available_interfaces(), "module:Class"))
    if claims := declared(name):
        origins = ", ".join(f"{point.distribution} ({point.value!r})" for point in claims)
        raise ConfigError(
            f"the interface name {name!r} is claimed by {origins} too; uninstall it, or write its 'module:Class'"
        )
    return _registered.get(name) or _checked(
        name, load_object(BUILT_IN[name], f"interface {name!r}", ConfigError)
    )


def _checked(name: str, cls: object) -> type[ModelInterface[Any]]:
    if isinstance(cls, type) and issubclass(cls, ModelInterface) and hasattr(cls, "config_class"):
        return cls
    raise ConfigError(
        f"the interface {name!r} is {cls!r}; it must be a subclass of ModelInterface with a config_class"
    )
