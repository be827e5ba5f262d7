"""Machines that die or are cut off, and drivers that die: seen in time, and nothing goes on without them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import cluster_functions as functions
import group_support as support
import pytest
from cluster_hosts import RAY, Cluster, cluster_of
from cluster_losses import Loss, driver_at, group_on, lose, ours
from pretend_machines import within

from core_rl.errors import ClusterError, RankDied
from core_rl.launch.group import EngineGroup
from core_rl.launch.hosts import Hosts

LEASE_S = 4.0


@pytest.fixture(params=["attach", "slurm", RAY])
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    with cluster_of(request.param, 3, tmp_path) as made:
        yield made


@pytest.fixture
def hosts(cluster: Cluster) -> Iterator[Hosts]:
    made = cluster.hosts(3, 1, LEASE_S)
    yield made
    made.close()


def error_of(cluster: Cluster, group: EngineGroup, machine: int, subject: Loss) -> RankDied:
    """The error of a call during which the last rank, which is on ``machine``, is lost."""
    rank = group.world_size - 1
    assert len(group.run(support.whoami)) == group.world_size
    threading.Timer(0.5, lose, (cluster, group, rank, machine, subject)).start()
    with pytest.raises(RankDied) as caught:
        group.run(functions.wait, 60.0)
    assert caught.value.rank == rank
    return caught.value


def test_lost_machines_are_named_and_the_rest_usable(cluster: Cluster, hosts: Hosts) -> None:
    with group_on(hosts, [0, 1]) as group:
        error = error_of(cluster, group, 1, "cable")
        assert "rank 1 on node1 (machine 1) was lost" in str(error)
    # The agent behind the cut and its ranks end by themselves.
    assert within(lambda: not ours(cluster.left([1]))), cluster.left([1])
    with pytest.raises(ClusterError, match=r"machine 1 \(node1.*was lost"):
        group_on(hosts, [0, 1])
    with group_on(hosts, [0, 2]) as group:
        assert group.run(functions.host_name) == ["node0", "node2"]
        error = error_of(cluster, group, 2, "machine")
        assert "rank 1 on node2 (machine 2) was lost" in str(error)
    with group_on(hosts, [0]) as group:
        assert group.run(functions.host_name) == ["node0"]
        error = error_of(cluster, group, 0, "agent")
        assert "rank 0 on node0 (machine 0) was lost with the agent of its machine" in str(error)
    assert within(lambda: not ours(cluster.left([0]))), cluster.left([0])


@pytest.mark.parametrize("moment", ["in a call", pytest.param("starting", marks=pytest.mark.nightly)])
def test_nothing_is_left_of_a_killed_driver(cluster: Cluster, moment: str) -> None:
    with driver_at(cluster, moment) as driver:
        driver.kill()
        assert within(lambda: not driver.left()), driver.left()
    # Slurm cleans up the step of an srun that had to be killed.
    assert within(lambda: not cluster.left()), cluster.left()
