"""The engines of a run: actor, critic, reference, reward model and rollout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from core_rl.backend.meta import FinetuneSpec, WeightUpdateMeta
from core_rl.config.capability import Capability
from core_rl.config.engine import EngineConfig, InferenceEngineConfig, TrainEngineConfig
from core_rl.config.layout import ParallelLayout
from core_rl.distributed.devices import device_type
from core_rl.engine import guards, inference_guards
from core_rl.engine.guards import require_sync
from core_rl.engine.inference import InferenceEngine
from core_rl.engine.loading import load_engine
from core_rl.errors import ConfigError, UnsupportedCapability, WeightsError, raise_all
from core_rl.launch.group import EngineGroup
from core_rl.launch.hosts.base import Hosts
from core_rl.registry.spec import EngineSpec
from core_rl.weight_sync.shared_memory import require_shared_memory
from core_rl_trainer.algorithms.fields import REFERENCE
from core_rl_trainer.loop.parts import require_portable
from core_rl_trainer.loop.prepared import Placement
from core_rl_trainer.recipe.cluster import ClusterSection
from core_rl_trainer.recipe.engines import engine_config
from core_rl_trainer.recipe.placement import PlacementSection, RankSlot, place_ranks, placement_problems
from core_rl_trainer.recipe.recipe import Recipe

__all__ = ["Plan", "Roles", "TrainPlan", "open_roles", "plan_roles", "plan_trained"]

TrainPlan = tuple[EngineSpec, TrainEngineConfig]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Specs and configs of all engines, checked before anything is started."""

    trainers: Mapping[str, TrainPlan]
    """By role: ``actor`` and, where the run has them, ``critic``, ``reference`` and ``reward``. There is no
    ``reference`` where it is the actor with its adapter off."""
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
        """The machine and the device of each rank of the role ``name``; the rollout engine is on one machine."""
        if name == "rollout":
            machine = (self.placement.machines(name) or (0,))[0]
            return tuple(RankSlot(machine, device) for device in self.rollout[1].own_devices)
        ranks = self.trainers[name][1].layout.world_size
        return place_ranks(ranks, self.placement.of(name), self.cluster)

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


@dataclass(frozen=True, kw_only=True)
class Roles:
    """The running engines. Each train role is an `EngineGroup`; some may share their processes."""

    actor: EngineGroup
    critic: EngineGroup | None
    reference: EngineGroup | None
    reward: EngineGroup | None
    rollout: InferenceEngine
    offloaded: tuple[EngineGroup, ...]
    """The groups that are in host memory while they do not work."""
    alternates: bool
    """Whether the rollout engine has its memory only while nobody trains."""

    @contextmanager
    def training(self) -> Iterator[None]:
        """Inside the context the train roles have the devices: the rollout engine has given its memory back."""
        if not self.alternates:
            yield
            return
        self.rollout.release_memory()
        yield
        # Not after an error: what has run out of memory would do so again.
        self.rollout.resume_memory()

    @contextmanager
    def working(self, group: EngineGroup) -> Iterator[EngineGroup]:
        """``group``, for calls inside the context; it is offloaded afterwards where it shares its devices."""
        if group not in self.offloaded:
            yield group
            return
        group.onload()
        try:
            yield group
        finally:
            group.offload()

    @contextmanager
    def as_reference(self) -> Iterator[EngineGroup]:
        """The reference policy: a group of its own, or the actor with its adapter off."""
        if self.reference is not None:
            with self.working(self.reference) as group:
                yield group
            return
        with self.working(self.actor) as group, group.disable_adapter():
            yield group

    def trained(self) -> dict[str, EngineGroup]:
        """The groups whose state a checkpoint holds, by name."""
        return {"actor": self.actor} | ({"critic": self.critic} if self.critic is not None else {})


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
    raise_all(ConfigError, "placement", _misplaced(plan))
    _require_shared_memory(recipe, plan)
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
    _require_devices_for_nccl(recipe, plan)
    return plan


def _require_devices_for_nccl(recipe: Recipe, plan: Plan) -> None:
    """Raise `ConfigError` where the actor's rank that sends weights over NCCL is on a server's device."""
    (_, actor), (spec, rollout) = plan.trainers["actor"], plan.rollout
    on_cuda = device_type(actor.device) == device_type(rollout.device) == "cuda"
    if recipe.rollout.sync != "distributed" or not on_cuda or not spec.supports(Capability.LAUNCH_SERVER):
        return
    slot = plan.sender()
    if slot in plan.slots("rollout"):
        raise ConfigError(
            f"rollout.sync = 'distributed': the actor sends from device {slot.device}, where a server runs as well, "
            "and NCCL takes one rank for each device; set rollout.sync to 'tensor', or give the servers other devices "
            "(placement.rollout)"
        )


def _require_shared_memory(recipe: Recipe, plan: Plan) -> None:
    """Raise `ConfigError` where weights that are synced by shared memory have no room there.

    Servers keep a version while the next one arrives; other engines take it bucket by bucket.
    """
    if recipe.rollout.sync != "tensor":
        return
    weights = sum(file.stat().st_size for file in Path(recipe.model.path).glob("*.safetensors"))
    servers = plan.rollout[0].supports(Capability.LAUNCH_SERVER)
    needed = 2 * weights if servers else min(weights, 2 * WeightUpdateMeta.bucket_bytes)
    try:
        require_shared_memory(needed, f"rollout.sync = 'tensor' for the weights in {recipe.model.path!r}")
    except WeightsError as error:
        raise ConfigError(str(error)) from error


def _misplaced(plan: Plan) -> Iterator[str]:
    """A sentence for each role whose ranks cannot be where the recipe wants them."""
    for name in PlacementSection.model_fields:
        chosen = plan.placement.of(name)
        said = name if chosen is None else f"{name} = {chosen}"
        if name == "rollout":
            yield from _misplaced_rollout(plan)
        elif name in plan.trainers:
            ranks = plan.trainers[name][1].layout.world_size
            yield from (f"{said}: {problem}" for problem in placement_problems(ranks, chosen, plan.cluster))
        elif chosen is not None:
            yield f"{said}: this run has no such role with ranks of its own; leave it out"


def _misplaced_rollout(plan: Plan) -> Iterator[str]:
    """Its devices are in its engine's config, and checked there."""
    machines = plan.placement.machines("rollout")
    if machines is not None and (plan.cluster.is_local and machines != (0,)):
        yield f"rollout = machines {list(machines)}: there is one machine, 0; set cluster.type and cluster.machines"
    elif machines is not None and not plan.cluster.is_local:
        yield (
            f"rollout = machines {list(machines)}: the engine {plan.rollout[0].name!r} runs on the machine of this "
            "command; leave machines out"
        )


def plan_trained(recipe: Recipe, head: str = "lm") -> TrainPlan:
    """Spec and config of the model that is trained. Raises as `plan_roles` does."""
    lora = recipe.model.lora.model_dump() if recipe.model.lora is not None else None
    model = {"path": recipe.model.path, "head": head, "lora": lora}
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
    if REFERENCE in wanted_fields and recipe.model.lora is None:
        found["reference"] = _train_plan(recipe, {"path": recipe.model.path}, None)
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
    return spec, config


def _rollout(recipe: Recipe, *, shares_devices: bool = False) -> tuple[EngineSpec, InferenceEngineConfig]:
    bounds = {
        "consumer_batch_size": recipe.rollout.prompts_per_step,
        "max_head_offpolicyness": recipe.rollout.max_head_offpolicyness,
        "max_concurrent_rollouts": recipe.rollout.max_concurrent_rollouts,
    }
    placed = {"devices": recipe.placement.devices("rollout") or (), "shares_devices": shares_devices}
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


@contextmanager
def open_roles(plan: Plan, finetune: FinetuneSpec, hosts: Hosts) -> Iterator[Roles]:
    """Start the engines on ``hosts``; all are closed on the way out. ``finetune`` is the length of the training."""
    with ExitStack() as stack:
        groups: dict[str, EngineGroup] = {}
        for name, part in plan.trainers.items():
            host_role = plan.colocated_with(name)
            group = EngineGroup(
                *part,
                ft_spec=finetune,
                timeout_s=plan.call_timeout_s,
                hosts=hosts if host_role is None else None,
                machines=plan.placement.machines(name) if host_role is None else None,
                devices=plan.placement.devices(name) if host_role is None else None,
                colocate_with=None if host_role is None else groups[host_role],
            )
            groups[name] = stack.enter_context(group)
            if plan.offloads(name):
                groups[name].offload()  # room for the next one
        spec, config = plan.rollout
        rollout = load_engine(spec, config)
        assert isinstance(rollout, InferenceEngine)
        stack.callback(rollout.destroy)
        rollout.initialize(None, finetune)
        yield Roles(
            actor=groups["actor"],
            critic=groups.get("critic"),
            reference=groups.get("reference"),
            reward=groups.get("reward"),
            rollout=rollout,
            offloaded=tuple(group for name, group in groups.items() if plan.offloads(name)),
            alternates=plan.alternates,
        )
