"""The machines of a run: the hosts that a recipe names, and what machines must see."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import training_support as support

from core_rl.config.base import parse_config
from core_rl.errors import ConfigError
from core_rl.launch.hosts import LocalHosts
from core_rl.launch.machines import call_on_machines
from core_rl_cluster import RayHosts
from core_rl_trainer import load_recipe
from core_rl_trainer.plan.resolve import resolve
from core_rl_trainer.plan.slots import sender_slot
from core_rl_trainer.recipe.cluster import ClusterSection
from core_rl_trainer.run import cluster
from core_rl_trainer.run.cluster import check_machines, cluster_hosts, missing_paths, open_cluster

RAY = {"type": "ray", "machines": 2, "ranks_per_machine": 2}
SCHEDULING = {"cpu": 3, "env": {"A": "b"}}


def section(**values: Any) -> ClusterSection:
    return parse_config(ClusterSection, values, "cluster")


def test_a_section_makes_its_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    assert isinstance(cluster_hosts(section(), {}, "cpu"), LocalHosts)
    monkeypatch.setenv("FLAG", "1")
    hosts = cluster_hosts(
        section(**RAY, wait_s=5.0, lease_s=7.0, environment=["FLAG"], scheduling=SCHEDULING), {}, "cpu"
    )
    assert isinstance(hosts, RayHosts)
    assert (hosts.machines, hosts.ranks_per_machine, hosts.wait_s, hosts.lease_s) == (2, 2, 5.0, 7.0)
    assert (hosts.resources, hosts.environment, hosts.address) == (
        {"CPU": 3},
        {"FLAG": "1", "A": "b"},
        "auto",
    )
    monkeypatch.delenv("FLAG")
    with pytest.raises(ConfigError, match=r"cluster.environment = \['FLAG'\]: not set on this machine"):
        cluster_hosts(section(**RAY, environment=["FLAG"]), {}, "cpu")


def test_a_function_runs_on_each_machine() -> None:
    with open_cluster(section(), {}, "cpu") as hosts:
        missing = call_on_machines(hosts, [0], missing_paths, [os.devnull, "/nowhere"])
    assert missing == {0: (os.uname().nodename, ["/nowhere"])}


def calls(blind: Callable[[int, str], bool]) -> Callable[..., dict[int, tuple[str, list[str]]]]:
    """A `call_on_machines` in which machine ``number`` lacks each path of which ``blind(number, path)`` is true."""

    def call(
        hosts: object, machines: Sequence[int], fn: object, paths: Sequence[str]
    ) -> dict[int, tuple[str, list[str]]]:
        return {n: (f"node{n}", [path for path in paths if blind(n, path)]) for n in machines}

    return call


LACKING = {
    "nothing": (lambda number, path: False, {}, None),
    "output": (
        lambda number, path: number == 1 and "/out/" in path,
        {},
        r"output_dir = '.*out': machine 1 \(node1\) and this machine .* do not see the same files there",
    ),
    "model": (
        lambda number, path: path.endswith("/model"),
        {},
        r"(?s)2 problems.*the model of the actor = '.*': it does not exist on machines 0 \(node0\) and 1 \(node1\)",
    ),
    "memory": (
        lambda number, path: path.startswith("/dev/shm"),
        {"rollout": {"sync": "tensor", "max_new_tokens": 4}},
        r"rollout.sync = 'tensor': it goes through the memory of one machine, and the actor sends from machine 0",
    ),
    "disk needs no memory": (lambda number, path: path.startswith("/dev/shm"), {}, None),
}


@pytest.mark.parametrize("case", LACKING)
def test_machines_with_missing_files_are_named(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    pytest.importorskip("core_rl_fsdp")
    pytest.importorskip("ray")
    blind, changes, message = LACKING[case]
    fsdp = {"engine": "fsdp", "engines": {"fsdp": {"layout": {"dp": 4}}}, "cluster": RAY}
    recipe = load_recipe(support.recipe_values(start, tmp_path / "out", **fsdp, **changes))
    recipe.directory.mkdir()
    monkeypatch.setattr(cluster, "call_on_machines", calls(blind))
    plan, hosts = resolve(recipe), RayHosts(2, 2)
    sender = sender_slot(plan.trainers["actor"]).machine if recipe.rollout.sync == "tensor" else None
    if message is None:
        check_machines(hosts, plan.trainers, recipe.directory, sender)
    else:
        with pytest.raises(ConfigError, match=message):
            check_machines(hosts, plan.trainers, recipe.directory, sender)
    assert not list(recipe.directory.iterdir())


def test_single_machine_needs_no_check(start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "call_on_machines", None)
    recipe = load_recipe(support.recipe_values(start, tmp_path / "out"))
    check_machines(LocalHosts(), resolve(recipe).trainers, recipe.directory)
