"""Resources of Ray and environment variables for the machines of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from core_rl.backend.meta import Scheduling
from core_rl.config.engine import EngineConfig
from core_rl.engine.loading import load_engine
from core_rl.launch.hosts import Slot
from core_rl_trainer.plan.run_plan import EnginePlan
from core_rl_trainer.recipe.cluster import SchedulingSection

Device = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True, kw_only=True)
class MachineRequest:
    """The amounts of each machine by Ray's names, and variables of the ranks."""

    resources: Mapping[str, float]
    env: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class _Need:
    """Resources of a role on the machines."""

    unit: Scheduling
    """One rank, or one server."""
    ranks: Counter[int]
    """Their number by machine."""
    processes: Counter[int]
    """The same, without ranks in processes of another role."""
    slots: tuple[Slot, ...]


def machine_request(
    engines: Mapping[str, EnginePlan[EngineConfig]], scheduling: SchedulingSection, device: Device
) -> MachineRequest:
    """Each amount of ``scheduling``, by default the needs of engines on ``device`` on the machine with the most.

    ``engines`` are on the cluster's machines, by role. Amounts that no engine knows are left out.
    """
    roles = [_need(engine, device) for engine in engines.values()]
    machines = {slot.machine for role in roles for slot in role.slots}
    cpu = max(
        (sum(role.unit.cpu * role.processes[number] for role in roles) for number in machines), default=0
    )
    memory = max(
        (sum(role.unit.memory_mib * role.ranks[number] for role in roles) for number in machines), default=0
    )
    gpu = max((slot.device + 1 for role in roles if role.unit.gpu for slot in role.slots), default=0)
    amounts: dict[str, float | None] = {
        "CPU": scheduling.cpu or cpu or None,
        "GPU": (gpu or None) if scheduling.gpu is None else scheduling.gpu,
        "memory": 2**20 * (memory if scheduling.memory_mib is None else scheduling.memory_mib) or None,
    }
    resources = {name: amount for name, amount in amounts.items() if amount is not None}
    env = {name: value for role in roles for name, value in role.unit.env}
    return MachineRequest(resources=resources | scheduling.resources, env=env | scheduling.env)


def _need(engine: EnginePlan[EngineConfig], device: Device) -> _Need:
    config = engine.config.model_copy(update={"device": device})
    unit = load_engine(engine.spec, config).get_scheduling_config()
    ranks = Counter(slot.machine for slot in engine.slots)
    processes = Counter[int]() if engine.colocated_with else ranks
    return _Need(unit=unit, ranks=ranks, processes=processes, slots=engine.slots)
