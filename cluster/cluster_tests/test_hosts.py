"""Groups on several machines do what groups on one do, whoever starts the agents."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cluster_functions as functions
import group_support as support
import pytest
import torch
from cluster_hosts import RAY, Cluster, cluster_of
from engine_support import TINY, batch, weighted_nll
from pretend_machines import within
from transformers import AutoConfig, AutoModelForCausalLM

from core_rl.backend.loss import LossSpec
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.errors import BatchError, ConfigError, RankDied, RankTimeout
from core_rl.launch.group import EngineGroup
from core_rl.launch.hosts import Hosts

LOSS = LossSpec(fn=weighted_nll)
MB = MicroBatchSpec(max_tokens=32)
LAYOUTS = [{"dp": 2}, {"dp": 2, "tp": 2}]
"""With one and two ranks on each of two machines."""
MODEL = {"config": {**TINY, "num_key_value_heads": 2}}
Results = list[dict[str, Any]]


LOCAL = pytest.param("local", marks=pytest.mark.nightly)
SLURM_AT_NIGHT = pytest.param("slurm", marks=pytest.mark.nightly)
# Tests of what ranks do, once they run: by day on hosts of one kind.
any_hosts = pytest.mark.parametrize(
    "cluster", [LOCAL, "attach", SLURM_AT_NIGHT, RAY], indirect=True, scope="module"
)


@pytest.fixture(scope="module", params=[LOCAL, "attach", "slurm", RAY])
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster_of(request.param, 2, tmp_path_factory.mktemp(request.param)) as made:
        yield made


@pytest.fixture(scope="module")
def hosts(cluster: Cluster) -> Iterator[Hosts]:
    made = cluster.hosts(2, 2)
    yield made
    made.close()
    assert within(lambda: not cluster.left()), cluster.left()


@pytest.fixture(scope="module")
def expected() -> Results:
    """Results of a group on this machine."""
    return [trained(layout, None, None) for layout in LAYOUTS]


@pytest.fixture(scope="module")
def shared(hosts: Hosts) -> Iterator[EngineGroup]:
    with support.echo_group(support.SPEC, support.config(dp=4), timeout_s=120, hosts=hosts) as group:
        yield group


def trained(layout: dict[str, int], hosts: Hosts | None, devices: list[int] | None) -> dict[str, Any]:
    """Metrics and weights after three steps of the FSDP engine."""
    settings: dict[str, Any] = {"model": MODEL, "layout": layout, "optimizer": {"lr": 1e-2}, "seed": 7}
    with EngineGroup("fsdp", **settings, hosts=hosts, devices=devices, threads_per_rank=1) as group:
        metrics = [group.train_batch(batch(step, (5, 9, 3, 8)), LOSS, MB) for step in range(3)]
        return {
            "metrics": metrics,
            "weights": group.named_tensors("master"),
            "hosts": group.run(functions.host_name),
        }


def place(cluster: Cluster, rank: int) -> str:
    """The phrase of messages about the machine of a rank, with two ranks on each."""
    return "" if cluster.is_local else rf" on node{rank // 2} \(machine {rank // 2}\)"


def names(cluster: Cluster, ranks_per_machine: int = 2) -> list[str]:
    """The host names of four ranks, or of two."""
    if cluster.is_local:
        return [socket.gethostname()] * 2 * ranks_per_machine
    return [machine.hostname for machine in cluster.machines for _ in range(ranks_per_machine)]


@pytest.mark.parametrize("number", range(len(LAYOUTS)))
def test_training_equals_local_training_bit_by_bit(
    cluster: Cluster, hosts: Hosts, expected: Results, number: int
) -> None:
    layout = LAYOUTS[number]
    of_each = 1 if len(layout) == 1 else 2
    devices = None if cluster.is_local else list(range(of_each))
    actual = trained(layout, hosts, devices)
    assert actual["hosts"] == names(cluster, of_each)
    assert actual["metrics"] == expected[number]["metrics"]
    assert list(actual["weights"]) == list(expected[number]["weights"])
    for name, tensor in actual["weights"].items():
        assert torch.equal(tensor, expected[number]["weights"][name]), name


def test_ranks_have_the_surroundings_of_their_machine(cluster: Cluster, shared: EngineGroup) -> None:
    for machine in cluster.machines:
        machine.output(["touch", f"/dev/shm/of_{machine.hostname}"])
    actual = shared.run(functions.surroundings)
    assert [one["hostname"] for one in actual] == names(cluster)
    if not cluster.is_local:
        assert all(one["interface"] == "eth0" for one in actual)
        assert [one["files"] for one in actual] == [[f"of_{one['hostname']}"] for one in actual]
        assert all(one["launched"] is None and not one["slurm"] and not one["key"] for one in actual)


@any_hosts
def test_calls_take_arguments_and_bring_results(shared: EngineGroup) -> None:
    large = torch.arange(3_000_000, dtype=torch.float32)
    for result in shared.run(support.echo, {"tensor": large, "text": "ä", "none": None}):
        assert isinstance(result["tensor"], torch.Tensor)
        assert torch.equal(result["tensor"], large)
        assert result["text"] == "ä"
    assert shared.run_each(support.whoami, [(rank,) for rank in range(4)]) == [
        (rank, rank) for rank in range(4)
    ]


@any_hosts
def test_ranks_of_all_machines_meet_in_a_collective(cluster: Cluster, hosts: Hosts) -> None:
    with support.echo_group(support.SPEC, support.config(dp=4), timeout_s=120, hosts=hosts) as group:
        assert group.run(support.gloo_sum) == [10.0] * 4


def test_a_layout_may_need_more_machines(cluster: Cluster, hosts: Hosts) -> None:
    with support.echo_group(support.SPEC, support.config(dp=2), timeout_s=120, hosts=hosts) as group:
        assert group.run(functions.host_name) == names(cluster)[:2]
        group.initialize(config=support.config(dp=4))
        assert group.run(functions.host_name) == names(cluster)
        group.initialize(config=support.config(tp=3))
        assert group.run(support.whoami) == [(0,), (1,), (2,)]


@any_hosts
def test_errors_keep_their_type_and_rank(cluster: Cluster, shared: EngineGroup) -> None:
    with pytest.raises(BatchError, match="7 tokens too many") as caught:
        shared.run(support.fail, (3,), BatchError("7 tokens too many"))
    assert "in fail\n    raise error" in "\n".join(caught.value.__notes__)
    assert caught.value.__cause__.rank == 3  # type: ignore[union-attr]
    assert len(shared.run(support.whoami)) == 4


@pytest.mark.parametrize("how", ["SIGKILL", pytest.param("SIGABRT", marks=pytest.mark.nightly)])
def test_dead_ranks_are_named_with_their_machine(cluster: Cluster, hosts: Hosts, how: str) -> None:
    with support.echo_group(support.SPEC, support.config(dp=4), timeout_s=120, hosts=hosts) as group:
        with pytest.raises(RankDied, match=rf"rank 3{place(cluster, 3)} was killed by {how}") as caught:
            group.run(functions.die, 3, how)
        assert caught.value.rank == 3
        if how == "SIGABRT":
            assert "in die" in caught.value.traceback
        group.restart()
        group.initialize()
        assert len(group.run(support.whoami)) == 4


@any_hosts
def test_hanging_ranks_show_their_stacks(cluster: Cluster, hosts: Hosts) -> None:
    with support.echo_group(support.SPEC, support.config(dp=4), timeout_s=120, hosts=hosts) as group:
        group.timeout_s = 1.0
        with pytest.raises(RankTimeout, match=r"ranks \[3\] of 4 did not answer") as caught:
            group.run(support.hang, (3,))
        assert "in hang" in caught.value.traceback


@any_hosts
def test_missing_models_are_refused_by_their_rank(cluster: Cluster, hosts: Hosts, tmp_path: Path) -> None:
    if cluster.is_local:
        pytest.skip("one machine has one file system")
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODEL["config"])).save_pretrained(
        cluster.folder / "model"
    )
    # In /tmp, which each machine has for itself: the driver and the first machine have it there.
    copy = ["cp", "-r", str(cluster.folder / "model"), str(tmp_path / "model")]
    cluster.machines[0].output(["mkdir", "-p", str(tmp_path)])
    cluster.machines[0].output(copy)
    subprocess.run(copy, check=True)
    path = str(tmp_path / "model")
    group = EngineGroup("fsdp", model={"path": path}, layout={"dp": 4}, hosts=hosts, timeout_s=60)
    with pytest.raises(ConfigError, match=path) as caught, group:
        pass
    assert "node1" in "".join(caught.value.__notes__)
