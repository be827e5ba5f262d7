"""Machines that die or are cut off, and drivers that die: seen in time, and nothing goes on without them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import cluster_functions as functions
import group_support as support
import pytest
from cluster_hosts import Cluster, cluster_of
from pretend_machines import SOON_S, Machine, within

from core_rl.errors import ClusterError, RankDied
from core_rl.launch.group import EngineGroup
from core_rl.launch.hosts.base import Hosts

LEASE_S = 4.0
DRIVER = Path(__file__).with_name("cluster_driver.py")
MARK = "CORE_RL_TEST_DRIVER"


@pytest.fixture(params=["attach", "slurm"])
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    with cluster_of(request.param, 3, tmp_path) as made:
        yield made


@pytest.fixture
def hosts(cluster: Cluster) -> Iterator[Hosts]:
    made = cluster.hosts(3, 1, LEASE_S)
    yield made
    made.close()


def echo_group(hosts: Hosts, machines: list[int]) -> EngineGroup:
    config = support.config(dp=len(machines))
    return support.echo_group(support.SPEC, config, timeout_s=120, hosts=hosts, machines=machines)


def lose(group: EngineGroup, machine: Machine, how: str) -> RankDied:
    """The error of a call during which ``machine`` is lost."""
    assert len(group.run(support.whoami)) == group.world_size
    getattr(machine, how)()
    with pytest.raises(RankDied) as caught:
        group.run(functions.wait, 60.0)
    return caught.value


def test_lost_machines_are_named_and_the_others_can_be_used(cluster: Cluster, hosts: Hosts) -> None:
    _, second, third = cluster.machines
    with echo_group(hosts, [0, 1]) as group:
        error = lose(group, second, "cut")
        assert "rank 1 on node1 (machine 1) was lost" in str(error)
        assert error.rank == 1
    # The agent behind the cut and its ranks end by themselves; Slurm's own process there waits for its srun.
    assert within(lambda: not ours(cluster.left([1])), SOON_S), cluster.left([1])
    with pytest.raises(ClusterError, match=r"machine 1 \(node1.*was lost"):
        echo_group(hosts, [0, 1])
    with echo_group(hosts, [0, 2]) as group:
        assert group.run(functions.host_name) == ["node0", "node2"]
        error = lose(group, third, "kill")
        assert "rank 1 on node2 (machine 2) was lost" in str(error)
    with echo_group(hosts, [0]) as group:
        assert group.run(functions.host_name) == ["node0"]
        (agent,) = (pid for pid, line in cluster.left([0]).items() if " agent " in line)
        threading.Timer(0.5, os.kill, (agent, signal.SIGKILL)).start()
        with pytest.raises(
            RankDied, match=r"rank 0 on node0 \(machine 0\) was lost with the agent of its machine"
        ):
            group.run(functions.wait, 60.0)
    assert within(lambda: not ours(cluster.left([0]))), cluster.left([0])


def ours(processes: Mapping[int, str]) -> list[str]:
    """Those that are not of Slurm itself."""
    return [line for line in processes.values() if "slurmstepd" not in line]


def of_driver(token: str) -> dict[int, str]:
    """The processes on this machine that a driver has started, and itself."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"{MARK}={token}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found[int(folder.name)] = (folder / "cmdline").read_bytes().decode(errors="replace")
    return found


@pytest.mark.parametrize("moment", ["in a call", pytest.param("starting", marks=pytest.mark.nightly)])
def test_nothing_is_left_of_a_killed_driver(cluster: Cluster, moment: str) -> None:
    cluster.start_agents(2)
    token = str(os.getpid())
    command = [sys.executable, str(DRIVER), cluster.kind, "2", "1", moment]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), MARK: token}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == f"{moment}\n"
        assert within(lambda: all(is_importing(cluster, number) for number in (0, 1)), 60)
        driver.send_signal(signal.SIGKILL)
        driver.wait()
        assert within(lambda: not of_driver(token) and not ours(cluster.left())), (
            of_driver(token),
            cluster.left(),
        )
    # Slurm cleans up the step of an srun that had to be killed.
    assert within(lambda: not cluster.left(), 60), cluster.left()


def is_importing(cluster: Cluster, machine: int) -> bool:
    """Whether the fork server there has begun to import torch, or has it."""
    for pid, line in cluster.left([machine]).items():
        with suppress(OSError):
            if "forkserver" in line and "libtorch" in Path(f"/proc/{pid}/maps").read_text():
                return True
    return False
