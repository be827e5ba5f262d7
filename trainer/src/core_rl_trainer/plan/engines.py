"""The plan of a run: the engine, the config and the places of each role."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from core_rl.backend.train_backend import TrainBackend
from core_rl.config.capability import Capability
from core_rl.config.engine import EngineConfig, InferenceEngineConfig, TrainEngineConfig
from core_rl.config.layout import ParallelLayout
from core_rl.engine import guards, inference_guards
from core_rl.engine.guards import require_sync
from core_rl.engine.loading import load_backend
from core_rl.errors import ConfigError, UnsupportedCapability, raise_all
from core_rl.registry.spec import EngineSpec
from core_rl_trainer.algorithms.fields import REFERENCE
from core_rl_trainer.plan.engine_checks import misplaced, require_devices_for_nccl, require_memory
from core_rl_trainer.plan.engine_config import engine_config
from core_rl_trainer.plan.run_plan import Placement
from core_rl_trainer.recipe.cluster import ClusterSection
from core_rl_trainer.recipe.placement import PlacementSection, RankSlot, place_ranks
from core_rl_trainer.recipe.recipe import Recipe
from core_rl_trainer.run.parts import require_portable

__all__ = ["Plan", "TrainPlan", "plan_roles", "plan_trained"]

TrainPlan = tuple[EngineSpec, TrainEngineConfig]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Specs and configs of all engines, checked before anything is started."""

    trainers: Mapping[str, TrainPlan]
    """By role: ``actor`` and, where the run has them, ``critic``, ``reference`` and ``reward``. There is no
    ``reference`` where it is the actor with its adapter off: with a new adapter."""
    rollout: tuple[EngineSpec, InferenceEngineConfig]
    colocated: bool
    cluster: ClusterSection
    placement: PlacementSection
    call_timeout_s: float
    """The time limit of each call of a train role, in seconds."""

    def roles(self) -> dict[str, tuple[EngineSpec, EngineConfig]]:
        """All roles that there are, by name."""
        return {**self.trainers, "rollout": self.rollout}

    def trained(self) -> dict[str, TrainPlan]:
        """The roles whose state a checkpoint holds."""
        return {name: self.trainers[name] for name in ("actor", "critic") if name in self.trainers}

    def slots(self, name: str) -> tuple[RankSlot, ...]:
        """The machine and the device of each rank of the role ``name``."""
        if name == "rollout" and not self.serves_on_machines:
            return tuple(RankSlot(0, device) for device in self.rollout[1].own_devices)
        if name == "rollout":
            ranks = self.rollout[1].layout.world_size
            return place_ranks(ranks, self.placement.of(name), self.cluster)
        ranks = self.trainers[name][1].layout.world_size
        return place_ranks(ranks, self.placement.of(name), self.cluster)

    @property
    def serves_on_machines(self) -> bool:
        """Whether servers are placed on machines of the cluster, instead of the one where the driver is."""
        return self.placement.serves_on_machines(self.cluster)

    def sender(self) -> RankSlot:
        """Where the rank of the actor is that sends weights."""
        layout = self.trainers["actor"][1].layout
        output = {"dp": 0, "tp": 0, "cp": 0, "pp": layout.pp - 1}
        ranks = range(layout.world_size)
        return self.slots("actor")[next(rank for rank in ranks if layout.coordinates(rank) == output)]

    def offloads(self, name: str) -> bool:
        """Return whether the role ``name`` is offloaded while others work: colocated, unless its devices are its own.

        Without a placement it is offloaded even alone, to make room for rollouts on its devices.
        """
        others = {slot for other in self.trainers if other != name for slot in self.slots(other)}
        shares = self.placement.of(name) is None or not others.isdisjoint(self.slots(name))
        return self.colocated and shares

    def colocated_with(self, name: str) -> str | None:
        """The role in whose processes the engine of ``name`` lives; None where it has processes of its own.

        Colocated roles on the same devices share their processes where they have the same layout: a process has one
        world, and on an accelerator each costs memory.
        """
        if name == "rollout" or not self.offloads(name):
            return None
        shared = (self.trainers[name][1].layout, self.slots(name))
        first = next(
            other
            for other, (_, config) in self.trainers.items()
            if self.offloads(other) and (config.layout, self.slots(other)) == shared
        )
        return None if first == name else first

    def placements(self) -> dict[str, Placement]:
        """The placements of the train roles, by name, and that of the rollout engine where the recipe gives one."""
        names = [*self.trainers, *(["rollout"] if self.placement.rollout is not None else [])]
        return {
            name: Placement(slots=self.slots(name), colocated_with=self.colocated_with(name))
            for name in names
        }

    @property
    def alternates(self) -> bool:
        """Whether the rollout engine gives its memory back while others train: colocated, on shared devices."""
        spec, config = self.rollout
        return self.colocated and config.shares_devices and spec.supports(Capability.RELEASE_MEMORY)


def plan_roles(recipe: Recipe, wanted_fields: frozenset[str]) -> Plan:
    """Specs and configs for ``recipe``; ``wanted_fields`` are those of its algorithm.

    Raises the errors of the registry, `ConfigError` with every field that an engine refuses, and
    `UnsupportedCapability` where an engine cannot hand over or take weights in this way.
    """
    actor, rollout = plan_trained(recipe), _rollout(recipe)
    require_sync(actor[0], recipe.rollout.sync)
    plan = Plan(
        trainers={"actor": actor, **_other_trainers(recipe, wanted_fields)},
        rollout=rollout,
        colocated=recipe.colocated,
        cluster=recipe.cluster,
        placement=recipe.placement,
        call_timeout_s=recipe.timeouts.call_s,
    )
    raise_all(ConfigError, "placement", misplaced(plan))
    require_memory(recipe, plan)
    trained = {slot for name in plan.trainers for slot in plan.slots(name)}
    return plan if trained.isdisjoint(plan.slots("rollout")) else _sharing(recipe, plan)


def _sharing(recipe: Recipe, plan: Plan) -> Plan:
    """``plan`` with a rollout engine that knows of the others on its devices."""
    plan = replace(plan, rollout=_rollout(recipe, shares_devices=True))
    ahead = recipe.rollout.max_head_offpolicyness
    if plan.alternates and ahead:
        raise ConfigError(
            f"colocated = true with rollout.max_head_offpolicyness = {ahead}: completions are generated while others "
            "train, and both are on the same devices; give the rollout engine devices of its own (placement.rollout), "
            "or set one of the two fields to false or 0"
        )
    require_devices_for_nccl(recipe, plan)
    return plan


def plan_trained(recipe: Recipe, head: str = "lm") -> TrainPlan:
    """Spec and config of the model that is trained. Raises as `plan_roles` does."""
    model = recipe.model.model_dump() | {"head": head}
    plan = _train_plan(recipe, model, recipe.optimizer.model_dump())
    if recipe.save_portable_every:
        require_portable(plan[0])
    if recipe.colocated and not plan[0].supports(Capability.OFFLOAD):
        raise UnsupportedCapability(
            f"colocated = true: the engine {plan[0].name!r} does not declare 'offload'"
        )
    return plan


def _other_trainers(recipe: Recipe, wanted_fields: frozenset[str]) -> dict[str, TrainPlan]:
    """The critic, the reference and the reward model, where the recipe or its algorithm has one."""
    found: dict[str, TrainPlan] = {}
    if (critic := recipe.critic) is not None:
        model = {"path": critic.path or recipe.model.path, "head": "value"}
        found["critic"] = _train_plan(recipe, model, critic.optimizer.model_dump(), critic.layout)
    lora = recipe.model.lora
    if REFERENCE in wanted_fields and (lora is None or lora.path is not None):
        found["reference"] = _train_plan(recipe, recipe.model.model_dump(), None)
    if (reward := recipe.reward_model) is not None:
        found["reward"] = _train_plan(recipe, {"path": reward.path, "head": "reward"}, None, reward.layout)
    return found


def _train_plan(
    recipe: Recipe,
    model: dict[str, Any],
    optimizer: dict[str, Any] | None,
    layout: ParallelLayout | None = None,
) -> TrainPlan:
    own = {} if layout is None else {"layout": layout.model_dump()}
    fields = {"model": model, "optimizer": optimizer}
    spec, config = engine_config(recipe, recipe.engine, "train", fields, own)
    assert isinstance(config, TrainEngineConfig)
    guards.check_config(spec, config)
    backend = load_backend(spec)()
    assert isinstance(backend, TrainBackend)  # of a spec of this kind
    backend.check_model(config)
    return spec, config


def _rollout(recipe: Recipe, *, shares_devices: bool = False) -> tuple[EngineSpec, InferenceEngineConfig]:
    bounds = {
        "consumer_batch_size": recipe.rollout.prompts_per_step,
        "max_head_offpolicyness": recipe.rollout.max_head_offpolicyness,
        "max_concurrent_rollouts": recipe.rollout.max_concurrent_rollouts,
    }
    placed = {"devices": _own_devices(recipe), "shares_devices": shares_devices}
    sections = dict.fromkeys(bounds, "rollout") | dict.fromkeys(placed, "placement")
    twice = sorted(sections.keys() & recipe.engines.get(recipe.rollout.engine, {}).keys())
    raise_all(
        ConfigError,
        f"engines.{recipe.rollout.engine}",
        (
            f"{name} follows from the section {sections[name]!r} of the recipe; leave it out here"
            for name in twice
        ),
    )
    fields = {"model": {"path": recipe.model.path, "lora": _served_adapter(recipe)}, **bounds, **placed}
    spec, config = engine_config(recipe, recipe.rollout.engine, "inference", fields)
    assert isinstance(config, InferenceEngineConfig)
    require_sync(spec, recipe.rollout.sync)
    inference_guards.check_config(spec, config)
    inference_guards.check_sampling(spec, recipe.rollout.sampling(), "section 'rollout'")
    return spec, config


def _own_devices(recipe: Recipe) -> tuple[int, ...]:
    """Devices of servers that run where the driver does; those on machines of a cluster get theirs there."""
    on_machines = recipe.placement.serves_on_machines(recipe.cluster)
    return () if on_machines else recipe.placement.devices("rollout") or ()


def _served_adapter(recipe: Recipe) -> dict[str, Any] | None:
    """The section ``model.lora`` of the rollout engine, which gets the adapter's values before the first step."""
    if recipe.rollout.sync != "lora":
        return None
    if recipe.model.lora is None:
        raise ConfigError(
            "rollout.sync = 'lora' sends an adapter, and model.lora is not set; set it, for example to {rank: 16}, or "
            "sync by 'disk', 'tensor' or 'distributed'"
        )
    return recipe.model.lora.model_dump() | {"path": None}
