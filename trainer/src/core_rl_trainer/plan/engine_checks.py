"""What is wrong with the places of roles."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from core_rl.backend.meta import WeightUpdateMeta
from core_rl.config.capability import Capability
from core_rl.distributed.devices import device_type
from core_rl.errors import ConfigError, WeightsError
from core_rl.weight_sync.buckets import require_shared_memory
from core_rl_trainer.recipe.placement import PlacementSection, placement_problems
from core_rl_trainer.recipe.recipe import Recipe

if TYPE_CHECKING:
    from core_rl_trainer.plan.engines import Plan

__all__ = ["misplaced", "require_devices_for_nccl", "require_memory"]


def require_devices_for_nccl(recipe: Recipe, plan: Plan) -> None:
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


def require_memory(recipe: Recipe, plan: Plan) -> None:
    """Raise `ConfigError` where weights that are synced by shared memory have no room there.

    Servers keep a version while the next one arrives; other engines take it bucket by bucket.
    """
    if recipe.rollout.sync != "tensor":
        return
    if plan.serves_on_machines:
        raise ConfigError(
            "rollout.sync = 'tensor' goes through the memory of one machine, and placement.rollout names machines for "
            "the servers; set it to 'distributed' or 'disk'"
        )
    weights = sum(file.stat().st_size for file in Path(recipe.model.path).glob("*.safetensors"))
    servers = plan.rollout[0].supports(Capability.LAUNCH_SERVER)
    needed = (
        2 * weights + WeightUpdateMeta.bucket_bytes
        if servers
        else min(weights, 2 * WeightUpdateMeta.bucket_bytes)
    )
    try:
        require_shared_memory(needed, f"rollout.sync = 'tensor' for the weights in {recipe.model.path!r}")
    except WeightsError as error:
        raise ConfigError(str(error)) from error


def misplaced(plan: Plan) -> Iterator[str]:
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
    """Sentences about the machines of servers; devices on the driver's own are checked with the engine's config."""
    chosen, (spec, config) = plan.placement.of("rollout"), plan.rollout
    if chosen is None or chosen.machines is None:
        return
    said = f"rollout = {chosen}"
    if plan.cluster.is_local:
        if chosen.machines != (0,):
            yield f"{said}: there is one machine, 0; set cluster.type and cluster.machines"
        return
    if not spec.supports(Capability.LAUNCH_SERVER):
        yield f"{said}: the engine {spec.name!r} has no servers, and runs where this command does; leave machines out"
        return
    ranks = config.layout.world_size
    yield from (f"{said}: {problem}" for problem in placement_problems(ranks, chosen, plan.cluster))
