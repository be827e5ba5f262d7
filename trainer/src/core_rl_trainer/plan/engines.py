"""The engines of a run: the spec, the config and the slots of each role, checked before an engine starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from core_rl.backend.meta import CheckpointFormat
from core_rl.backend.train_backend import TrainBackend
from core_rl.config.capability import Capability
from core_rl.config.engine import InferenceEngineConfig, OptimizerConfig, TrainEngineConfig
from core_rl.config.layout import ParallelLayout
from core_rl.engine import guards, inference_guards
from core_rl.engine.guards import require_capability, require_sync
from core_rl.engine.loading import load_backend
from core_rl.errors import ConfigError, raise_all
from core_rl.launch.hosts import Slot
from core_rl.registry.spec import EngineSpec
from core_rl.toolkit.footprint import footprint_of
from core_rl.toolkit.model_files import require_unquantized
from core_rl_trainer.algorithms.interface import ModelInterface
from core_rl_trainer.algorithms.sft import SupervisedInterface
from core_rl_trainer.plan.engine_config import ConfiguredEngine, EngineSections
from core_rl_trainer.plan.run_plan import EnginePlan
from core_rl_trainer.plan.slots import (
    misplaced_roles,
    place_ranks,
    placement_problems,
    require_free_device,
    require_sync_memory,
)
from core_rl_trainer.recipe.cluster import ClusterSection, PlacementSection
from core_rl_trainer.recipe.rollout import RolloutSection
from core_rl_trainer.recipe.sections import CriticSection, ModelSection, RewardModelSection

Trainer: TypeAlias = tuple[EngineSpec, TrainEngineConfig]
TrainerPlans: TypeAlias = dict[str, EnginePlan[TrainEngineConfig]]
RolloutPlan: TypeAlias = EnginePlan[InferenceEngineConfig]


def resume_format(spec: EngineSpec) -> CheckpointFormat:
    """The format of run checkpoints: the engine's own, which is exact, where it has one."""
    return "sharded" if spec.supports(Capability.SHARDED_CHECKPOINT) else "portable"


def trained_engine(configured: ConfiguredEngine, interface: ModelInterface[Any]) -> Trainer:
    """The engine of the trained model, with the head whose outputs the loss of ``interface`` takes."""
    spec, config = configured
    scores = isinstance(interface, SupervisedInterface) and "scores" in interface.loss().outputs
    model = config.model.model_copy(update={"head": "reward" if scores else "lm"})
    return checked_trainer((spec, config.model_copy(update={"model": model})))


def checked_trainer(configured: ConfiguredEngine) -> Trainer:
    """Check the layout, dtype and model of a train engine against its capabilities, and ``model.frozen``."""
    spec, config = configured
    assert isinstance(config, TrainEngineConfig)
    guards.check_config(spec, config)
    backend = load_backend(spec)()
    assert isinstance(backend, TrainBackend)  # of a spec of this kind
    backend.check_model(config)
    if config.optimizer is None:
        return spec, config
    require_unquantized(config.model)
    frozen = config.model.frozen
    if not footprint_of(config.model).trained:
        raise ConfigError(
            f"model.frozen = {list(frozen)} matches all parameters, so that nothing is left to train; leave some out"
        )
    return spec, config


def other_trainers(
    name: str,
    engines: EngineSections,
    model: ModelSection,
    critic: CriticSection | None,
    reward_model: RewardModelSection | None,
    *,
    with_reference: bool,
) -> dict[str, Trainer]:
    """The critic, the reference and the reward model on the engine ``name``, where a run has them.

    The reference is the actor with its adapter off where that begins as a new one.
    """

    def configured(
        fields: Mapping[str, Any], optimizer: OptimizerConfig | None, layout: ParallelLayout | None = None
    ) -> Trainer:
        values = {"model": fields, "optimizer": None if optimizer is None else optimizer.model_dump()}
        overrides = {} if layout is None else {"layout": layout.model_dump()}
        return checked_trainer(engines.configure(name, "train", values, overrides))

    trainers: dict[str, Trainer] = {}
    if critic is not None:
        fields = {"path": critic.path or model.path, "head": "value"}
        trainers["critic"] = configured(fields, critic.optimizer, critic.layout)
    if with_reference and (model.lora is None or model.lora.path is not None):
        trainers["reference"] = configured(model.model_dump(), None)
    if reward_model is not None:
        fields = {"path": reward_model.path, "head": "reward"}
        trainers["reward"] = configured(fields, None, reward_model.layout)
    return trainers


def plan_supervised_engine(trained: Trainer, cluster: ClusterSection) -> TrainerPlans:
    """The engine of the model; raises `ConfigError` where its ranks do not fit on the machines."""
    spec, config = trained
    ranks = config.layout.world_size
    raise_all(ConfigError, "cluster", placement_problems(ranks, None, cluster))
    return {"model": EnginePlan(spec=spec, config=config, slots=place_ranks(ranks, None, cluster))}


def plan_online_engines(
    section: RolloutSection,
    model: ModelSection,
    engines: EngineSections,
    trainers: Mapping[str, Trainer],
    cluster: ClusterSection,
    placement: PlacementSection,
    *,
    colocated: bool,
) -> tuple[TrainerPlans, RolloutPlan]:
    """The processes of ``trainers``, by role, and the rollout engine.

    Raises the errors of the registry, `ConfigError` with every field that an engine refuses, and
    `UnsupportedCapability` where an engine cannot send or take weights in this way.
    """
    on_machines = placement.serves_on_machines(cluster)
    require_sync(trainers["actor"][0], section.sync)
    slots = {
        name: place_ranks(config.layout.world_size, placement.of(name), cluster)
        for name, (_, config) in trainers.items()
    }
    served = {"path": model.path, "vision": model.vision, "lora": _served_adapter(section.sync, model)}
    _, unplaced = engines.configure(section.engine, "inference", {"model": served}, {})
    count = unplaced.layout.world_size
    if on_machines:
        servers = place_ranks(count, placement.of("rollout"), cluster)
    else:  # on devices of the driver's machine
        servers = tuple(Slot(0, device) for device in placement.devices("rollout") or range(count))
    shares = not set(servers).isdisjoint(slot for role in slots.values() for slot in role)
    spec, config = _configured_rollout(
        engines,
        section,
        served,
        {"devices": () if on_machines else placement.devices("rollout") or (), "shares_devices": shares},
    )
    alternates = colocated and shares and spec.supports(Capability.RELEASE_MEMORY)
    placed = servers if placement.rollout is not None else ()
    rollout = EnginePlan(spec=spec, config=config, slots=placed, offloaded=alternates)
    plans = _plans(trainers, slots, placement, colocated)
    raise_all(ConfigError, "placement", misplaced_roles(plans, rollout, placement, cluster))
    if section.sync == "tensor":
        require_sync_memory(spec, model.path, on_machines)
    if alternates and section.max_head_offpolicyness:
        raise ConfigError(
            f"colocated = true with rollout.max_head_offpolicyness = {section.max_head_offpolicyness}: completions are "
            "generated while others train, and both are on the same devices; give the rollout engine devices of its "
            "own (placement.rollout), or set one of the two fields to false or 0"
        )
    if section.sync == "distributed":
        require_free_device(plans["actor"], rollout, servers)
    return plans, rollout


def _plans(
    trainers: Mapping[str, Trainer],
    slots: Mapping[str, tuple[Slot, ...]],
    placement: PlacementSection,
    colocated: bool,
) -> TrainerPlans:
    """The train roles with their processes.

    A colocated role is offloaded while others work, unless its devices are its own. Colocated roles on the same
    devices share their processes where they have the same layout: a process has one world, and on an accelerator each
    costs memory.
    """
    plans: TrainerPlans = {}
    for name, (spec, config) in trainers.items():
        peers = {slot for peer in trainers if peer != name for slot in slots[peer]}
        offloaded = colocated and (placement.of(name) is None or not peers.isdisjoint(slots[name]))
        first = next(
            (
                peer
                for peer, plan in plans.items()
                if plan.offloaded and (plan.config.layout, plan.slots) == (config.layout, slots[name])
            ),
            None,
        )
        plans[name] = EnginePlan(
            spec=spec,
            config=config,
            slots=slots[name],
            colocated_with=first if offloaded else None,
            offloaded=offloaded,
        )
    return plans


def _configured_rollout(
    engines: EngineSections, section: RolloutSection, model: Mapping[str, Any], placed: Mapping[str, Any]
) -> tuple[EngineSpec, InferenceEngineConfig]:
    bounds = {
        "consumer_batch_size": section.prompts_per_step,
        "max_head_offpolicyness": section.max_head_offpolicyness,
        "max_concurrent_rollouts": section.max_concurrent_rollouts,
    }
    sources = dict.fromkeys(bounds, "rollout") | dict.fromkeys(placed, "placement")
    raise_all(
        ConfigError,
        f"engines.{section.engine}",
        (
            f"{name} follows from the section {sources[name]!r} of the recipe; leave it out here"
            for name in sorted(sources.keys() & engines.of(section.engine).keys())
        ),
    )
    fields = {"model": model, **bounds, **placed}
    spec, config = engines.configure(section.engine, "inference", fields, {})
    assert isinstance(config, InferenceEngineConfig)
    require_sync(spec, section.sync)
    if section.sync_delta:
        require_capability(spec, Capability.SYNC_DELTA, "rollout.sync_delta")
    inference_guards.check_config(spec, config)
    inference_guards.check_sampling(spec, section.sampling(), "section 'rollout'")
    return spec, config


def _served_adapter(sync: str, model: ModelSection) -> dict[str, Any] | None:
    """The section ``model.lora`` of the rollout engine, which gets the adapter's values before the first step."""
    if sync != "lora":
        return None
    if model.lora is None:
        raise ConfigError(
            "rollout.sync = 'lora' sends an adapter, and model.lora is not set; set it, for example to {rank: 16}, or "
            "sync by 'disk', 'tensor' or 'distributed'"
        )
    return model.lora.model_dump() | {"path": None}
