"""Groups on machines of a Ray cluster do what groups on one machine do."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cluster_functions as functions
import group_support as support
import pytest
import torch
from engine_support import TINY, batch, weighted_nll
from pretend_machines import within
from ray_cluster import Cluster
from transformers import AutoConfig, AutoModelForCausalLM

from core_rl.backend.loss import LossSpec
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.errors import BatchError, ConfigError, RankDied, RankTimeout
from core_rl.launch.group import EngineGroup
from core_rl.launch.machines import server_processes
from core_rl_cluster import RayHosts

LOSS = LossSpec(fn=weighted_nll)
MB = MicroBatchSpec(max_tokens=32)
MODEL = {"config": {**TINY, "num_key_value_heads": 2}}
NAMES = ["node0", "node0", "node1", "node1"]


@pytest.fixture(scope="module")
def hosts(cluster: Cluster) -> Iterator[RayHosts]:
    with cluster.hosts(len(cluster.machines), 2) as made:  # all, so that each has the number of its name
        yield made
    assert within(lambda: not cluster.left()), cluster.left()


@pytest.fixture(scope="module")
def shared(hosts: RayHosts) -> Iterator[EngineGroup]:
    with echo_group(hosts) as group:
        yield group


def echo_group(hosts: RayHosts, **settings: Any) -> EngineGroup:
    config = settings.pop("config", support.config(dp=4))
    return support.echo_group(support.SPEC, config, timeout_s=120, hosts=hosts, **settings)


def trained(layout: dict[str, int], hosts: RayHosts | None, devices: list[int] | None) -> dict[str, Any]:
    """Metrics and weights after three steps of the FSDP engine."""
    settings: dict[str, Any] = {"model": MODEL, "layout": layout, "optimizer": {"lr": 1e-2}, "seed": 7}
    with EngineGroup("fsdp", **settings, hosts=hosts, devices=devices, threads_per_rank=1) as group:
        metrics = [group.train_batch(batch(step, (5, 9, 3, 8)), LOSS, MB) for step in range(3)]
        return {
            "metrics": metrics,
            "weights": group.named_tensors("master"),
            "hosts": group.run(functions.host_name),
        }


@pytest.mark.parametrize(
    ("layout", "devices", "names"),
    [({"dp": 2}, [0], NAMES[1:3]), pytest.param({"dp": 2, "tp": 2}, None, NAMES, marks=pytest.mark.nightly)],
)
def test_training_equals_local_training_bit_by_bit(
    hosts: RayHosts, layout: dict[str, int], devices: list[int] | None, names: list[str]
) -> None:
    expected, actual = trained(layout, None, None), trained(layout, hosts, devices)
    assert actual["hosts"] == names
    assert actual["metrics"] == expected["metrics"]
    assert list(actual["weights"]) == list(expected["weights"])
    for name, tensor in actual["weights"].items():
        assert torch.equal(tensor, expected["weights"][name]), name


def test_ranks_have_the_surroundings_of_their_machine(cluster: Cluster, shared: EngineGroup) -> None:
    for machine in cluster.machines:
        machine.output(["touch", f"/dev/shm/of_{machine.hostname}"])
    actual = shared.run(functions.surroundings)
    assert [one["hostname"] for one in actual] == NAMES
    assert all(one["interface"] == "eth0" for one in actual)
    assert [one["files"] for one in actual] == [[f"of_{name}"] for name in NAMES]
    assert all(one["launched"] is None and not one["launcher"] for one in actual)


def test_calls_take_arguments_and_bring_results(shared: EngineGroup) -> None:
    large = torch.arange(3_000_000, dtype=torch.float32)
    for result in shared.run(support.echo, {"tensor": large, "text": "ä", "none": None}):
        assert isinstance(result["tensor"], torch.Tensor)
        assert torch.equal(result["tensor"], large)
        assert result["text"] == "ä"
    expected = [(rank, rank) for rank in range(4)]
    assert shared.run_each(support.whoami, [(rank,) for rank in range(4)]) == expected


def test_large_arguments_are_separate_in_each_rank(shared: EngineGroup) -> None:
    """All ranks of a machine get them through one object of Ray, which none may change for the others."""
    large = torch.zeros(1_000_000)
    for _ in range(2):
        assert shared.run(functions.add_rank, large) == [float(rank) for rank in range(4)]
    assert large.sum() == 0


def test_two_groups_meet_on_the_same_machines(hosts: RayHosts, shared: EngineGroup) -> None:
    with echo_group(hosts) as group:
        assert group.run(support.gloo_sum) == [10.0] * 4
        assert shared.run(support.gloo_sum) == [10.0] * 4
        # Each machine numbers its processes for itself.
        assert not set(zip(NAMES, group.pids, strict=True)) & set(zip(NAMES, shared.pids, strict=True))


def test_a_layout_may_need_more_machines(hosts: RayHosts) -> None:
    with echo_group(hosts, config=support.config(dp=2)) as group:
        assert group.run(functions.host_name) == NAMES[:2]
        group.initialize(config=support.config(dp=4))
        assert group.run(functions.host_name) == NAMES
        group.initialize(config=support.config(tp=3))
        assert group.run(support.whoami) == [(0,), (1,), (2,)]


def test_errors_keep_their_type_and_rank(shared: EngineGroup) -> None:
    with pytest.raises(BatchError, match="7 tokens too many") as caught:
        shared.run(support.fail, (3,), BatchError("7 tokens too many"))
    assert "in fail\n    raise error" in "\n".join(caught.value.__notes__)
    assert caught.value.__cause__.rank == 3  # type: ignore[union-attr]
    assert len(shared.run(support.whoami)) == 4


@pytest.mark.parametrize("signal", ["SIGKILL", "SIGABRT"])
def test_dead_ranks_are_named_with_their_machine(hosts: RayHosts, signal: str) -> None:
    with echo_group(hosts) as group:
        with pytest.raises(
            RankDied, match=rf"rank 3 on node1 \(machine 1\) was killed by {signal}"
        ) as caught:
            group.run(functions.die, 3, signal)
        assert caught.value.rank == 3
        if signal == "SIGABRT":
            assert "in die" in caught.value.traceback
        group.restart()
        group.initialize()
        assert len(group.run(support.whoami)) == 4


def test_hanging_ranks_show_their_stacks(hosts: RayHosts) -> None:
    with echo_group(hosts) as group:
        group.timeout_s = 1.0
        with pytest.raises(RankTimeout, match=r"ranks \[3\] of 4 did not answer") as caught:
            group.run(support.hang, (3,))
        assert "in hang" in caught.value.traceback


def test_a_server_runs_on_its_machine(cluster: Cluster, hosts: RayHosts) -> None:
    first, second = server_processes(hosts, 2, ranks_per_server=2)
    assert [second.machine, second.address] == [1, "10.77.0.11"]
    second.start()
    pid = second.call(functions.start_child)
    assert second.call(functions.this_host) == "node1"
    assert any("sleep 4321" in line for line in cluster.left([1]).values()), pid
    second.close()
    assert within(lambda: not any("sleep 4321" in line for line in cluster.left([1]).values()))
    first.close()


def test_missing_models_are_refused_by_their_rank(cluster: Cluster, hosts: RayHosts, tmp_path: Path) -> None:
    saved = cluster.folder / "model"
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODEL["config"])).save_pretrained(saved)
    # In a directory that each machine has for itself: the driver and the first machine have the model there.
    path = Path("/dev/shm/model-of-a-test")
    for run in (subprocess.check_call, cluster.machines[0].output):
        run(["cp", "-r", str(saved), str(path)])
    group = EngineGroup("fsdp", model={"path": str(path)}, layout={"dp": 4}, hosts=hosts, timeout_s=60)
    try:
        with pytest.raises(ConfigError, match=str(path)) as caught, group:
            pass
    finally:
        subprocess.check_call(["rm", "-r", str(path)])
    assert "node1" in "".join(caught.value.__notes__)
