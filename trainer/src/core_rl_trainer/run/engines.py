"""The running engines of a run: one for each role of its algorithm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from core_rl.backend.meta import FinetuneSpec
from core_rl.config.capability import Capability
from core_rl.config.engine import InferenceEngineConfig, TrainEngineConfig
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.engine.inference import InferenceEngine
from core_rl.engine.loading import load_engine
from core_rl.launch.group import EngineGroup
from core_rl.launch.hosts import Hosts
from core_rl.launch.machines import server_processes
from core_rl_trainer.plan.run_plan import EnginePlan


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
    """Whether the rollout engine has its memory only between training phases."""
    driver_address: str | None = None
    """Address of this machine towards the cluster; None for a single machine."""

    @contextmanager
    def training(self) -> Iterator[None]:
        """Inside the context the train roles have the devices: the rollout engine has given its memory back."""
        if not self.alternates:
            yield
            return
        self.rollout.release_memory()
        yield
        # Not after an error: a second attempt would run out of memory again.
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


def micro_batches_of(
    groups: Sequence[EngineGroup | None], max_tokens: int, share_prefixes: bool
) -> MicroBatchSpec:
    """The cut of batches for ``groups``; they share prefixes where all engines that declare it can."""
    declared = [
        group for group in groups if group is not None and group.spec.supports(Capability.SHARED_PREFIX)
    ]
    share = share_prefixes and bool(declared) and all(group.shares_prefixes for group in declared)
    return MicroBatchSpec(max_tokens=max_tokens, share_prefixes=share)


@contextmanager
def open_trainers(
    plans: Mapping[str, EnginePlan[TrainEngineConfig]], finetune: FinetuneSpec, timeout_s: float, hosts: Hosts
) -> Iterator[dict[str, EngineGroup]]:
    """Start the train engines on ``hosts``, by role; all are closed on the way out.

    ``finetune`` is the length of the training, and ``timeout_s`` the time limit of a call.
    """
    with ExitStack() as stack:
        groups: dict[str, EngineGroup] = {}
        for name, plan in plans.items():
            host_role = plan.colocated_with
            group = EngineGroup(
                plan.spec,
                plan.config,
                ft_spec=finetune,
                timeout_s=timeout_s,
                hosts=hosts if host_role is None else None,
                machines=plan.machines if host_role is None else None,
                devices=plan.devices if host_role is None else None,
                colocate_with=None if host_role is None else groups[host_role],
            )
            groups[name] = stack.enter_context(group)
            if plan.offloaded:
                group.offload()  # room for the next one
        yield groups


@contextmanager
def open_roles(
    trainers: Mapping[str, EnginePlan[TrainEngineConfig]],
    rollout: EnginePlan[InferenceEngineConfig],
    finetune: FinetuneSpec,
    timeout_s: float,
    hosts: Hosts,
    *,
    servers_on_machines: bool,
) -> Iterator[Roles]:
    """Start the engines of all roles; as `open_trainers`, and servers on machines of ``hosts`` where they belong."""
    with open_trainers(trainers, finetune, timeout_s, hosts) as groups, ExitStack() as stack:
        engine = load_engine(rollout.spec, rollout.config)
        assert isinstance(engine, InferenceEngine)
        stack.callback(engine.destroy)
        addresses = None
        if servers_on_machines:
            servers, ranks = rollout.config.layout.dp, rollout.config.layout.world_size
            places = (rollout.machines, rollout.devices)
            processes = server_processes(hosts, servers, ranks // servers, *places)
            addresses = engine.launch_server(processes=processes)
        engine.initialize(addresses, finetune)
        yield Roles(
            actor=groups["actor"],
            critic=groups.get("critic"),
            reference=groups.get("reference"),
            reward=groups.get("reward"),
            rollout=engine,
            offloaded=tuple(groups[name] for name, plan in trainers.items() if plan.offloaded),
            alternates=rollout.offloaded,
            driver_address=hosts.driver_address,
        )
