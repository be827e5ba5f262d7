"""Checks of roles on their machines and devices."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from core_rl.backend.meta import WeightUpdateMeta
from core_rl.config.capability import Capability
from core_rl.config.engine import InferenceEngineConfig, TrainEngineConfig
from core_rl.distributed.devices import device_type
from core_rl.errors import ConfigError, WeightsError
from core_rl.launch.hosts import Slot
from core_rl.registry.spec import EngineSpec
from core_rl.weight_sync.buckets import require_shared_memory
from core_rl_trainer.plan.run_plan import EnginePlan
from core_rl_trainer.plan.slots import placement_problems
from core_rl_trainer.recipe.cluster import ClusterSection
from core_rl_trainer.recipe.placement import PlacementSection

__all__ = ["misplaced_roles", "require_free_device", "require_sync_memory", "sender_slot"]


def sender_slot(actor: EnginePlan[TrainEngineConfig]) -> Slot:
    """The slot of the actor's rank that sends weights."""
    layout = actor.config.layout
    output = {"dp": 0, "tp": 0, "cp": 0, "pp": layout.pp - 1}
    ranks = range(layout.world_size)
    return actor.slots[next(rank for rank in ranks if layout.coordinates(rank) == output)]


def require_free_device(
    actor: EnginePlan[TrainEngineConfig],
    rollout: EnginePlan[InferenceEngineConfig],
    servers: Collection[Slot],
) -> None:
    """Raise `ConfigError` where the actor's rank that sends weights over NCCL is on a device of ``servers``."""
    on_cuda = device_type(actor.config.device) == device_type(rollout.config.device) == "cuda"
    if not on_cuda or not rollout.spec.supports(Capability.LAUNCH_SERVER):
        return
    slot = sender_slot(actor)
    if slot in servers:
        raise ConfigError(
            f"rollout.sync = 'distributed': the actor sends from device {slot.device}, where a server runs as well, "
            "and NCCL takes one rank for each device; set rollout.sync to 'tensor', or give the servers other devices "
            "(placement.rollout)"
        )


def require_sync_memory(rollout: EngineSpec, model_path: str, servers_on_machines: bool) -> None:
    """Raise `ConfigError` where weights that are synced by shared memory have no room there.

    Servers keep a version while the next one arrives; other engines take it bucket by bucket.
    """
    if servers_on_machines:
        raise ConfigError(
            "rollout.sync = 'tensor' goes through the memory of one machine, and placement.rollout names machines for "
            "the servers; set it to 'distributed' or 'disk'"
        )
    weights = sum(file.stat().st_size for file in Path(model_path).glob("*.safetensors"))
    needed = (
        2 * weights + WeightUpdateMeta.bucket_bytes
        if rollout.supports(Capability.LAUNCH_SERVER)
        else min(weights, 2 * WeightUpdateMeta.bucket_bytes)
    )
    try:
        require_shared_memory(needed, f"rollout.sync = 'tensor' for the weights in {model_path!r}")
    except WeightsError as error:
        raise ConfigError(str(error)) from error


def misplaced_roles(
    trainers: Mapping[str, EnginePlan[TrainEngineConfig]],
    rollout: EnginePlan[InferenceEngineConfig],
    placement: PlacementSection,
    cluster: ClusterSection,
) -> Iterator[str]:
    """A sentence for each role whose ranks do not fit into its placement."""
    for name in PlacementSection.model_fields:
        section = placement.of(name)
        subject = name if section is None else f"{name} = {section}"
        if name == "rollout":
            yield from _misplaced_rollout(rollout, placement, cluster)
        elif name in trainers:
            ranks = trainers[name].config.layout.world_size
            yield from (f"{subject}: {problem}" for problem in placement_problems(ranks, section, cluster))
        elif section is not None:
            yield f"{subject}: this run has no such role with ranks of its own; leave it out"


def _misplaced_rollout(
    rollout: EnginePlan[InferenceEngineConfig], placement: PlacementSection, cluster: ClusterSection
) -> Iterator[str]:
    """Sentences about the machines of servers; devices of the driver's machine are checked with the engine's config."""
    section = placement.of("rollout")
    if section is None or section.machines is None:
        return
    subject = f"rollout = {section}"
    if cluster.is_local:
        if section.machines != (0,):
            yield f"{subject}: there is one machine, 0; set cluster.type and cluster.machines"
        return
    if not rollout.spec.supports(Capability.LAUNCH_SERVER):
        yield (
            f"{subject}: the engine {rollout.spec.name!r} has no servers, and runs where this command does; leave "
            "machines out"
        )
        return
    ranks = rollout.config.layout.world_size
    yield from (f"{subject}: {problem}" for problem in placement_problems(ranks, section, cluster))
