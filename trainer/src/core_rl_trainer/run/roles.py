"""The running engines of a run: one for each role of its algorithm."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from core_rl.backend.meta import FinetuneSpec
from core_rl.engine.inference import InferenceEngine
from core_rl.engine.loading import load_engine
from core_rl.launch.group import EngineGroup
from core_rl.launch.hosts import Hosts
from core_rl.launch.server_processes import server_processes
from core_rl_trainer.plan.engines import Plan

__all__ = ["Roles", "open_roles"]


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
    driver_address: str | None = None
    """The address of this machine towards those of the cluster; None where there are no others."""

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
        """The reference policy: a group of its own, or the actor with its adapter off where that began as new."""
        if self.reference is not None:
            with self.working(self.reference) as group:
                yield group
            return
        with self.working(self.actor) as group, group.disable_adapter():
            yield group

    def trained(self) -> dict[str, EngineGroup]:
        """The groups whose state a checkpoint holds, by name."""
        return {"actor": self.actor} | ({"critic": self.critic} if self.critic is not None else {})


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
        rollout.initialize(_servers_on_machines(plan, rollout, hosts), finetune)
        yield Roles(
            actor=groups["actor"],
            critic=groups.get("critic"),
            reference=groups.get("reference"),
            reward=groups.get("reward"),
            rollout=rollout,
            offloaded=tuple(group for name, group in groups.items() if plan.offloads(name)),
            alternates=plan.alternates,
            driver_address=hosts.driver_address,
        )


def _servers_on_machines(plan: Plan, rollout: InferenceEngine, hosts: Hosts) -> tuple[str, ...] | None:
    """Addresses of servers on the machines that the recipe names; None where the engine starts its own."""
    if not plan.serves_on_machines:
        return None
    layout, chosen = rollout.config.layout, plan.placement.of("rollout")
    assert chosen is not None
    servers, ranks = layout.dp, layout.world_size // layout.dp
    processes = server_processes(hosts, servers, ranks, chosen.machines, chosen.devices)
    return rollout.launch_server(processes=processes)
