"""A Ray cluster of pretend machines, and what is left on them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from pretend_machines import Machine, pretend_machines
from ray_nodes import of_ray, ray_nodes

from core_rl_cluster import RayHosts

LEASE_S = 10.0
WAIT_S = 60.0


@dataclass(frozen=True)
class Cluster:
    """Pretend machines with a Ray node each, and the driver's."""

    machines: list[Machine]
    folder: Path
    """Shared by all machines."""
    _present: Sequence[frozenset[int]]
    """For each machine the processes that it had before."""

    def hosts(self, machines: int, ranks_per_machine: int = 1, lease_s: float = LEASE_S) -> RayHosts:
        """Hosts on ``machines`` of the machines."""
        return RayHosts(machines, ranks_per_machine, wait_s=WAIT_S, lease_s=lease_s)

    def named(self, hostname: str) -> Machine:
        """The machine with this name."""
        (machine,) = (machine for machine in self.machines if machine.hostname == hostname)
        return machine

    def left(self, numbers: Sequence[int] | None = None) -> dict[int, str]:
        """The processes of the machines ``numbers``, by default all, that were not there at first."""
        actual: dict[int, str] = {}
        for machine, present in zip(self.machines, self._present, strict=True):
            if numbers is None or machine.number in numbers:
                lines = machine.processes().items()
                actual |= {pid: line for pid, line in lines if pid not in present and not of_ray(line)}
        return actual


@contextmanager
def ray_cluster(count: int, folder: Path, shared: Sequence[Path] = ()) -> Iterator[Cluster]:
    """``count`` machines with Ray, which this process is a driver of; they see ``folder`` and ``shared``."""
    with (
        pretend_machines(count, [folder, *shared]) as machines,
        ray_nodes(machines) as environ,
        mock.patch.dict(os.environ, environ),
    ):
        present = [frozenset(machine.processes()) for machine in machines]
        yield Cluster(machines, folder, present)
