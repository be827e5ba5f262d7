"""The section ``cluster`` of a recipe, and the placement of roles on machines."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import training_support as support
from rich.console import Console

from core_rl.config.base import parse_config
from core_rl.errors import ConfigError
from core_rl.launch.hosts import Slot
from core_rl_trainer import dry_run, load_recipe
from core_rl_trainer.cli.plan import print_plan
from core_rl_trainer.plan.resolve import resolve
from core_rl_trainer.plan.slots import describe_slots, place_ranks, placement_problems
from core_rl_trainer.recipe.cluster import ClusterSection, RolePlacement
from core_rl_trainer.recipe.recipe import Recipe
from core_rl_trainer.run.cluster import machine_request

RAY = {"type": "ray", "machines": 2, "ranks_per_machine": 2}


HALF = {"fsdp": {"layout": {"dp": 2}}}


def cluster(**values: Any) -> ClusterSection:
    return parse_config(ClusterSection, values, "cluster")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"machines": 2}, "type 'local' has no use for 'machines', which is of 'ray'"),
        ({"scheduling": {"gpu": 1}}, "type 'local' has no use for 'scheduling'"),
        ({"type": "ray", "machines": 2}, "type 'ray' needs ranks_per_machine"),
        ({**RAY, "machines": 0}, "'machines' = 0"),
        ({"type": "kubernetes"}, "'type' = 'kubernetes'"),
        ({"nodes": 2}, "unknown field 'nodes'"),
        ({**RAY, "scheduling": {"gpus": 2}}, "did you mean 'gpu'"),
        ({**RAY, "scheduling": {"resources": {"H100": 0}}}, "scheduling.resources.H100"),
        ({**RAY, "environment": ["A-B"]}, "environment.0"),
        ({"machines": 2, "lease_s": 1.0}, "(?s)'machines'.*'lease_s'"),
    ],
)
def test_a_wrong_cluster_section_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cluster(**values)


def test_written_defaults_are_read_again() -> None:
    for section in (cluster(restarts=2), cluster(**RAY, restarts=1, scheduling={"cpu": 3})):
        assert cluster(**section.model_dump(mode="json")) == section


PLACED = [
    (4, None, [(0, 0), (0, 1), (1, 0), (1, 1)], "0, 1 of machines 0, 1"),
    (1, None, [(0, 0)], "0"),
    (2, {"machines": [1]}, [(1, 0), (1, 1)], "0, 1 of machine 1"),
    (2, {"devices": [1]}, [(0, 1), (1, 1)], "1 of machines 0, 1"),
    (3, {"machines": [1, 0]}, [(1, 0), (1, 1), (0, 0)], "0, 1 of machine 1, 0 of machine 0"),
]


@pytest.mark.parametrize(("ranks", "role", "slots", "text"), PLACED)
def test_ranks_fill_machines_in_order(
    ranks: int, role: dict[str, Any] | None, slots: list[tuple[int, int]], text: str
) -> None:
    placement = None if role is None else RolePlacement(**role)
    assert list(placement_problems(ranks, placement, cluster(**RAY))) == []
    actual = place_ranks(ranks, placement, cluster(**RAY))
    assert actual == tuple(Slot(*slot) for slot in slots)
    assert describe_slots(actual) == text


MISPLACED = [
    (2, {"machines": [0, 5]}, "there is no machine 5; the cluster has 2 machines, from 0 on"),
    (4, {"machines": [1, 1]}, "machine 1 is named twice"),
    (2, {"devices": [0, 0]}, "device 0 is named twice"),
    (1, {"devices": [2]}, "there is no device 2; cluster.ranks_per_machine = 2"),
    (5, None, "it has 5 ranks, and there is room for 4: 2 machines with 2 devices each"),
    (2, {"machines": [0, 1]}, "it has 2 ranks, and there is room for 4"),
    (3, {"devices": [0, 1]}, "it has 3 ranks, and there is room for 4"),
]


@pytest.mark.parametrize(("ranks", "role", "message"), MISPLACED)
def test_impossible_placement_is_named(ranks: int, role: dict[str, Any] | None, message: str) -> None:
    placement = None if role is None else RolePlacement(**role)
    assert message in "\n".join(placement_problems(ranks, placement, cluster(**RAY)))


def recipe(start: Path, output: Path, **changes: Any) -> Recipe:
    pytest.importorskip("core_rl_fsdp")
    fsdp = {"engine": "fsdp", "engines": {"fsdp": {"layout": {"dp": 4}}}, "cluster": RAY}
    return load_recipe(support.recipe_values(start, output, **(fsdp | changes)))


def test_all_placement_problems_come_at_once(start: Path, tmp_path: Path) -> None:
    placement = {"actor": {"machines": [3]}, "critic": [0], "rollout": {"machines": [1]}}
    with pytest.raises(ConfigError) as caught:
        dry_run(recipe(start, tmp_path / "out", placement=placement))
    text = str(caught.value)
    assert "actor = machines [3]: there is no machine 3" in text
    assert "critic = devices [0]: this run has no such role" in text
    assert "rollout = machines [1]" in text


def test_oversized_supervised_run_is_refused(start: Path, tmp_path: Path) -> None:
    pytest.importorskip("core_rl_fsdp")
    changes = {"engine": "fsdp", "engines": {"fsdp": {"layout": {"dp": 8}}}, "cluster": RAY}
    values = support.supervised_values(start, tmp_path / "out", "sft", **changes)
    with pytest.raises(ConfigError, match="cluster: it has 8 ranks, and there is room for 4"):
        dry_run(load_recipe(values))


def test_the_plan_shows_cluster_and_machines(start: Path, tmp_path: Path) -> None:
    placement = {"reference": {"machines": [1, 0]}}
    plan = dry_run(recipe(start, tmp_path / "out", placement=placement))
    actor, reference, _ = plan.roles
    assert (actor.machines, actor.devices) == ((0, 0, 1, 1), (0, 1, 0, 1))
    assert reference.machines == (1, 1, 0, 0)
    console = Console(file=io.StringIO(), width=200)
    print_plan(plan, console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "ray, 2 machines with at most 2 ranks of a role each" in text
    assert "0, 1 of machines 0, 1" in text and "0, 1 of machines 1, 0" in text


@pytest.mark.parametrize(
    ("scheduling", "changes", "resources", "env"),
    [
        ({}, {}, {"CPU": 4}, {}),  # two ranks of the actor and of its reference
        ({}, {"placement": {"reference": {"machines": [1]}}, "engines": HALF}, {"CPU": 2}, {}),
        ({"cpu": 9, "gpu": 0, "memory_mib": 2}, {}, {"CPU": 9, "GPU": 0, "memory": 2 * 2**20}, {}),
        ({"resources": {"H100": 0.1}, "env": {"A": "b"}}, {}, {"CPU": 4, "H100": 0.1}, {"A": "b"}),
    ],
)
def test_machines_give_what_engines_need(
    start: Path,
    tmp_path: Path,
    scheduling: dict[str, Any],
    changes: dict[str, Any],
    resources: dict[str, float],
    env: dict[str, str],
) -> None:
    section = {"cluster": RAY | {"scheduling": scheduling}}
    plan = resolve(recipe(start, tmp_path / "out", **(section | changes)))
    assert machine_request(plan.trainers, plan.cluster.scheduling, "cpu") == (resources, env)
