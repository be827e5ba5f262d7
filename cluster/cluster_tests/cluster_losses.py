"""Ranks, agents, machines, cables and drivers that fail while a group works, and their leftovers."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

import group_support as support
from cluster_hosts import Cluster
from pretend_machines import within

from core_rl.launch.group import EngineGroup
from core_rl.launch.hosts import Hosts

__all__ = ["LOSSES", "Driver", "Loss", "driver_at", "group_on", "lose", "ours"]

Loss = Literal["rank", "agent", "machine", "cable"]
LOSSES: tuple[Loss, ...] = ("rank", "agent", "machine", "cable")
SCRIPT = Path(__file__).with_name("cluster_driver.py")
MARK = "CORE_RL_TEST_DRIVER"


def group_on(hosts: Hosts, machines: Sequence[int]) -> EngineGroup:
    """A group with one rank on each of ``machines``."""
    config = support.config(dp=len(machines))
    return support.echo_group(support.SPEC, config, timeout_s=120, hosts=hosts, machines=machines)


def lose(cluster: Cluster, group: EngineGroup, rank: int, machine: int, subject: Loss) -> None:
    """Lose ``rank`` of ``group`` on ``machine``, or a resource of it, at once."""
    target = cluster.machines[machine]
    match subject:
        case "rank":
            target.output(["kill", "-KILL", str(group.pids[rank])])
        case "agent":
            (agent,) = (pid for pid, line in cluster.left([machine]).items() if " agent " in line)
            os.kill(agent, signal.SIGKILL)
        case "machine":
            target.kill()
        case "cable":
            target.cut()


def ours(processes: Mapping[int, str]) -> dict[int, str]:
    """Return processes but Slurm's own, which waits for an srun that had to be killed."""
    return {pid: line for pid, line in processes.items() if "slurmstepd" not in line}


class Driver:
    """A driver that is a process of its own, with two machines."""

    def __init__(self, cluster: Cluster, process: subprocess.Popen[str], token: str) -> None:
        self._cluster, self._process, self._token = cluster, process, token

    def kill(self) -> None:
        """``kill -9`` of the driver alone."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def left(self) -> dict[int, str]:
        """Return its processes, here and on the machines."""
        actual = ours(self._cluster.left())
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if f"{MARK}={self._token}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                    actual[int(folder.name)] = (folder / "cmdline").read_bytes().decode(errors="replace")
        return actual


@contextmanager
def driver_at(cluster: Cluster, moment: str) -> Iterator[Driver]:
    """A driver at ``moment`` (see `cluster_driver`), with fork servers that have begun to import torch, or have it."""
    cluster.start_agents(2)
    token = secrets.token_hex(8)
    command = [sys.executable, str(SCRIPT), cluster.kind, "2", "1", moment]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), MARK: token}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        try:
            _read_up_to(moment, process)
            assert within(lambda: _importing(cluster) == 2), cluster.left()
            yield Driver(cluster, process, token)
        finally:
            process.kill()


def _read_up_to(moment: str, process: subprocess.Popen[str]) -> None:
    """Wait until the driver prints ``moment``. Ray prints what agents print there too."""
    assert process.stdout is not None
    printed = []
    for line in process.stdout:
        if line == f"{moment}\n":
            return
        printed.append(line)
    raise AssertionError(
        f"the driver ended with {process.wait()} before it was {moment}:\n{''.join(printed)}"
    )


def _importing(cluster: Cluster) -> int:
    """The number of machines with a fork server that has begun to import torch, or has it."""
    return sum(_is_importing(cluster, machine.number) for machine in cluster.machines)


def _is_importing(cluster: Cluster, machine: int) -> bool:
    for pid, line in cluster.left([machine]).items():
        with suppress(OSError):
            if "forkserver" in line and "libtorch" in Path(f"/proc/{pid}/maps").read_text():
                return True
    return False
