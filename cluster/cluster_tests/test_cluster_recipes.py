"""Recipes on several machines train as on one machine."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import training_support as support
from cluster_hosts import RAY, Cluster, cluster_of
from cluster_losses import ours
from pretend_machines import DRIVER_ADDRESS, within
from rich.console import Console

from core_rl.errors import ConfigError
from core_rl_trainer import train
from core_rl_trainer.callbacks import Event, StepEnd

pytestmark = pytest.mark.nightly

FSDP = {"engine": "fsdp", "engines": {"fsdp": {"layout": {"dp": 4}}}}
MACHINES = {"machines": 2, "ranks_per_machine": 2, "wait_s": 120.0, "lease_s": 10.0}
SERVERS: dict[str, tuple[str, dict[str, Any]]] = {
    "sglang": ("CORE_RL_SGLANG_PYTHON", {}),
    "vllm": ("CORE_RL_VLLM_PYTHON", {"private_network": True}),
}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return support.make_start(tmp_path_factory.mktemp("start"), head_size=32)  # which vLLM has on CPUs


@pytest.fixture(params=["slurm", RAY])
def cluster(request: pytest.FixtureRequest, start: Path, tmp_path: Path) -> Iterator[Cluster]:
    with cluster_of(request.param, 3, tmp_path, shared=[start]) as made:
        yield made


def section(cluster: Cluster, **changes: Any) -> dict[str, Any]:
    address = {} if cluster.kind == "ray" else {"address": DRIVER_ADDRESS}
    return {"type": cluster.kind, **MACHINES, **address, **changes}


def curve(values: dict[str, Any]) -> list[Any]:
    train(values, console=Console(quiet=True))
    return support.curve(Path(values["output_dir"]))


@pytest.mark.parametrize("sync", ["disk", "distributed"])
def test_curves_on_two_machines_equal_the_local_curve(
    cluster: Cluster, start: Path, tmp_path: Path, sync: str
) -> None:
    rollout = {"prompts_per_step": 6, "group_size": 3, "max_new_tokens": 4, "sync": sync}
    changes = FSDP | {"rollout": rollout, "steps": 3}
    expected = curve(support.recipe_values(start, tmp_path / "one", **changes))
    changes["cluster"] = section(cluster)
    assert curve(support.recipe_values(start, tmp_path / "many", **changes)) == expected
    assert within(lambda: not cluster.left()), cluster.left()


@pytest.mark.parametrize("sync", ["disk", "distributed"])
@pytest.mark.parametrize("server", SERVERS)
def test_a_server_on_a_third_machine(
    cluster: Cluster, start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: str, sync: str
) -> None:
    """The actor on two machines, and a real server on another one: every step hands over its weights."""
    variable, options = SERVERS[server]
    if not os.environ.get(variable):
        pytest.skip(f"{variable} names no Python with {server}")
    monkeypatch.setenv("SERVER_KEY", "a key of this test")
    section_of_server = {"options": {"api_key": "${env:SERVER_KEY}", **options}}
    rollout = {"engine": server, "prompts_per_step": 4, "group_size": 2, "max_new_tokens": 4, "sync": sync}
    changes = FSDP | {"rollout": rollout, "steps": 2, "algorithm": {"type_": "ppo_actor"}}
    changes["engines"] = {**FSDP["engines"], server: section_of_server}  # type: ignore[dict-item]
    changes["placement"] = {"actor": {"machines": [0, 1]}, "rollout": {"machines": [2]}}
    changes["cluster"] = section(cluster, machines=3)
    rows = curve(support.recipe_values(start, tmp_path / "served", **changes))
    # Both sides agree on log-probs, so the server has the trainer's weights.
    gaps = [row["mismatch_max"] for row in rows if "mismatch_max" in row]
    assert gaps
    assert max(gaps) < 1e-4
    assert within(lambda: not cluster.left()), cluster.left()


def test_restart_on_the_remaining_machine(cluster: Cluster, start: Path, tmp_path: Path) -> None:
    """The first of two machines is gone for good; the scheduler has to give the other one."""
    layout = {"engine": "fsdp", "engines": {"fsdp": {"layout": {"dp": 2}}}}
    unbroken = curve(support.supervised_values(start, tmp_path / "one", "sft", **layout))
    lost, console = tmp_path / "many", Console(file=io.StringIO(), width=200)

    def power_off(event: Event) -> None:
        if isinstance(event, StepEnd) and event.step == 3:
            cluster.machines[0].kill()
            cluster.machines[2].kill()  # which could take its place

    changes = section(cluster, ranks_per_machine=1, wait_s=45.0, restarts=1, layouts={1: {"dp": 1}})
    values = support.supervised_values(start, lost, "sft", **layout, cluster=changes)
    train(values, callbacks=[power_off], console=console)
    assert isinstance(console.file, io.StringIO)
    assert "from the checkpoint of step 2, on 1 machine: " in console.file.getvalue()
    losses = [[row["loss"] for row in rows[1:]] for rows in (support.curve(lost), unbroken)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert within(lambda: not ours(cluster.left([1]))), cluster.left()


def test_unshared_directories_are_named(
    cluster: Cluster, start: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    local = tmp_path_factory.mktemp("of this machine alone")
    values = support.recipe_values(start, local / "output", **FSDP, cluster=section(cluster))
    with pytest.raises(ConfigError, match="output_dir"):
        train(values, console=Console(quiet=True))
