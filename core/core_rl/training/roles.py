"""The engines of a run: the actor that is trained, its frozen reference, and the rollout engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from core_rl.algorithms.policy_loss import REFERENCE
from core_rl.config.base import parse_config
from core_rl.config.engine import EngineConfig, InferenceEngineConfig, TrainEngineConfig
from core_rl.engines.inference import InferenceEngine
from core_rl.engines.meta import FinetuneSpec, SaveLoadMeta
from core_rl.engines.registry import get_spec, load_config, load_engine
from core_rl.engines.spec import Capability, EngineKind, EngineSpec
from core_rl.errors import ConfigError, raise_all
from core_rl.launch.group import EngineGroup
from core_rl.training.recipe import Recipe

__all__ = ["Plan", "Roles", "open_roles", "plan_roles"]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Specs and configs of all engines, checked before anything is started."""

    actor: tuple[EngineSpec, TrainEngineConfig]
    reference: tuple[EngineSpec, TrainEngineConfig] | None
    rollout: tuple[EngineSpec, InferenceEngineConfig]
    finetune: FinetuneSpec


@dataclass(frozen=True, kw_only=True)
class Roles:
    """The running engines."""

    actor: EngineGroup
    reference: EngineGroup | None
    rollout: InferenceEngine

    def saved_state(self, path: str) -> SaveLoadMeta:
        """How the actor saves itself for a resume: in its own format, which is exact, where it has one."""
        own = self.actor.spec.supports(Capability.SHARDED_CHECKPOINT)
        return SaveLoadMeta(path=path, format="sharded" if own else "portable")


def plan_roles(recipe: Recipe, wanted_fields: frozenset[str]) -> Plan:
    """Specs and configs for ``recipe``; ``wanted_fields`` are those of its algorithm.

    Raises the errors of the registry, and `ConfigError` with every field that an engine refuses.
    """
    spec, config = _config(recipe, recipe.engine, "train", {"optimizer": recipe.optimizer.model_dump()})
    _, frozen = _config(recipe, recipe.engine, "train", {"optimizer": None})
    bounds = {
        "consumer_batch_size": recipe.rollout.prompts_per_step,
        "max_head_offpolicyness": recipe.rollout.max_head_offpolicyness,
        "max_concurrent_rollouts": recipe.rollout.max_concurrent_rollouts,
    }
    twice = sorted(bounds.keys() & recipe.engines.get(recipe.rollout.engine, {}).keys())
    raise_all(
        ConfigError,
        f"engines.{recipe.rollout.engine}",
        (f"{name} follows from the section 'rollout' of the recipe; leave it out here" for name in twice),
    )
    rollout_spec, rollout = _config(recipe, recipe.rollout.engine, "inference", bounds)
    assert isinstance(config, TrainEngineConfig)
    assert isinstance(frozen, TrainEngineConfig)
    assert isinstance(rollout, InferenceEngineConfig)
    prompts = recipe.rollout.prompts_per_step
    return Plan(
        actor=(spec, config),
        reference=(spec, frozen) if REFERENCE in wanted_fields else None,
        rollout=(rollout_spec, rollout),
        finetune=FinetuneSpec(dataset_size=recipe.steps * prompts, train_batch_size=prompts),
    )


def _config(
    recipe: Recipe, name: str, kind: EngineKind, fields: dict[str, Any]
) -> tuple[EngineSpec, EngineConfig]:
    spec = get_spec(name)
    if spec.kind != kind:
        raise ConfigError(f"the engine {name!r} is for {spec.kind}; this place needs one for {kind}")
    common = {
        "model": {"path": recipe.model.path},
        "dtype": recipe.dtype,
        "device": recipe.device,
        "seed": recipe.seed,
    }
    section = recipe.engines.get(name, {})
    return spec, parse_config(load_config(spec), common | fields | section, f"engine {name!r}")


@contextmanager
def open_roles(plan: Plan) -> Iterator[Roles]:
    """Start the engines; all are closed on the way out."""
    with ExitStack() as stack:
        actor = _group(stack, plan.actor, plan.finetune)
        reference = _group(stack, plan.reference, plan.finetune) if plan.reference else None
        spec, config = plan.rollout
        engine_class = load_engine(spec)
        assert issubclass(engine_class, InferenceEngine)
        rollout = engine_class(spec, config)
        stack.callback(rollout.destroy)
        rollout.initialize(None, plan.finetune)
        yield Roles(actor=actor, reference=reference, rollout=rollout)


def _group(
    stack: ExitStack, engine: tuple[EngineSpec, TrainEngineConfig], finetune: FinetuneSpec
) -> EngineGroup:
    group = stack.enter_context(EngineGroup(*engine))
    group.initialize(finetune)
    return group
