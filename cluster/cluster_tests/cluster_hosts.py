"""Every kind of hosts on pretend machines, for tests that are the same for all of them."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
from pretend_machines import DRIVER_ADDRESS, Machine, pretend_machines
from ray_nodes import of_ray, ray_nodes
from slurm_daemons import slurm_daemons

from core_rl.launch.hosts import Hosts, LocalHosts
from core_rl_cluster.attach import AttachHosts
from core_rl_cluster.ray import RayHosts
from core_rl_cluster.slurm import SlurmHosts

__all__ = ["KINDS", "LEASE_S", "RAY", "Cluster", "agent_command", "cluster_of", "make_hosts"]

PORT = 29400
KEY_VARIABLE = "CORE_RL_CLUSTER_KEY"
LEASE_S = 10.0
WAIT_S = 120.0
RAY = pytest.param("ray", marks=pytest.mark.nightly)
StartAgents = Callable[[int], None]


@dataclass(frozen=True)
class _Kind:
    """Maker of one kind of hosts."""

    prepare: Callable[
        [Sequence[Machine], Path], AbstractContextManager[tuple[Mapping[str, str], StartAgents]]
    ]
    """The variables of a driver, and a function that starts agents where the hosts themselves do not."""
    make: Callable[[int, int, float], Hosts]
    """Hosts for a driver with these variables: machines, ranks for each, and the lease in seconds."""


@dataclass(frozen=True)
class Cluster:
    """Pretend machines that hosts of one kind can be made on, one at a time."""

    kind: str
    machines: list[Machine]
    environ: Mapping[str, str]
    """Variables of a driver; set in this process."""
    start_agents: StartAgents
    folder: Path
    """Shared by all machines."""
    _present: Sequence[frozenset[int]]
    """For each machine the processes that it had before."""

    @property
    def is_local(self) -> bool:
        """Whether ranks run on the driver's machine."""
        return self.kind == "local"

    def hosts(self, machines: int, ranks_per_machine: int = 1, lease_s: float = LEASE_S) -> Hosts:
        """Hosts on the first ``machines`` machines."""
        self.start_agents(machines)
        return make_hosts(self.kind, machines, ranks_per_machine, lease_s)

    def left(self, numbers: Sequence[int] | None = None) -> dict[int, str]:
        """The processes of the machines ``numbers``, by default all, that were not there at first."""
        actual: dict[int, str] = {}
        for machine, present in zip(self.machines, self._present, strict=True):
            if numbers is None or machine.number in numbers:
                target = machine.processes().items()
                actual |= {pid: line for pid, line in target if pid not in present and not of_ray(line)}
        return actual


def make_hosts(kind: str, machines: int, ranks_per_machine: int, lease_s: float) -> Hosts:
    """Hosts of ``kind``, in a process with the variables of its cluster."""
    return KINDS[kind].make(machines, ranks_per_machine, lease_s)


@contextmanager
def cluster_of(kind: str, count: int, folder: Path, shared: Sequence[Path] = ()) -> Iterator[Cluster]:
    """``count`` pretend machines for hosts of ``kind``; ``folder`` and ``shared`` are there for all machines."""
    with (
        pretend_machines(count, [folder, *shared]) as machines,
        KINDS[kind].prepare(machines, folder) as (environ, start),
        mock.patch.dict(os.environ, environ),
    ):
        present = [frozenset(machine.processes()) for machine in machines]
        yield Cluster(kind, machines, environ, start, folder, present)


def agent_command(*arguments: str) -> list[str]:
    """The command that starts an agent for the driver of the test."""
    driver = f"--driver={DRIVER_ADDRESS}:{PORT}"
    return [sys.executable, "-m", "core_rl.cli", "agent", driver, f"--wait={WAIT_S:g}", *arguments]


@contextmanager
def _local(machines: Sequence[Machine], folder: Path) -> Iterator[tuple[Mapping[str, str], StartAgents]]:
    yield {}, lambda count: None


@contextmanager
def _attach(machines: Sequence[Machine], folder: Path) -> Iterator[tuple[Mapping[str, str], StartAgents]]:
    environ = {KEY_VARIABLE: secrets.token_hex(32)}
    agents: list[subprocess.Popen[str]] = []

    def start(count: int) -> None:
        for machine in machines[:count]:
            log = folder / f"agent{machine.number}.log"
            agents.append(machine.run(agent_command(f"--machine={machine.number}"), environ, log))

    try:
        yield environ, start
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()


@contextmanager
def _slurm(machines: Sequence[Machine], folder: Path) -> Iterator[tuple[Mapping[str, str], StartAgents]]:
    with slurm_daemons(machines, folder / "slurm") as slurm, slurm.allocation(len(machines)) as environ:
        yield environ, lambda count: None


@contextmanager
def _ray(machines: Sequence[Machine], folder: Path) -> Iterator[tuple[Mapping[str, str], StartAgents]]:
    with ray_nodes(machines) as environ:
        yield environ, lambda count: None


def _local_hosts(machines: int, ranks_per_machine: int, lease_s: float) -> Hosts:
    return LocalHosts()


def _attach_hosts(machines: int, ranks_per_machine: int, lease_s: float) -> Hosts:
    address = DRIVER_ADDRESS
    return AttachHosts(
        machines, ranks_per_machine, port=PORT, address=address, wait_s=WAIT_S, lease_s=lease_s
    )


def _slurm_hosts(machines: int, ranks_per_machine: int, lease_s: float) -> Hosts:
    return SlurmHosts(machines, ranks_per_machine, address=DRIVER_ADDRESS, wait_s=WAIT_S, lease_s=lease_s)


def _ray_hosts(machines: int, ranks_per_machine: int, lease_s: float) -> Hosts:
    return RayHosts(machines, ranks_per_machine, wait_s=WAIT_S, lease_s=lease_s)


KINDS = {
    "local": _Kind(_local, _local_hosts),
    "attach": _Kind(_attach, _attach_hosts),
    "slurm": _Kind(_slurm, _slurm_hosts),
    "ray": _Kind(_ray, _ray_hosts),
}
