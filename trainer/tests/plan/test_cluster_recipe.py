"""The section ``cluster`` of a recipe, and the placement of roles on machines."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import training_support as support
from rich.console import Console

from core_rl.config.base import parse_config
from core_rl.config.capability import Capability
from core_rl.errors import ConfigError
from core_rl.launch.hosts import Slot
from core_rl_trainer import dry_run, load_recipe
from core_rl_trainer.cli.plan import print_plan
from core_rl_trainer.plan.resolve import resolve
from core_rl_trainer.plan.slots import describe_slots, place_ranks, placement_problems
from core_rl_trainer.recipe.cluster import ClusterSection
from core_rl_trainer.recipe.placement import RolePlacement
from core_rl_trainer.recipe.recipe import Recipe

SLURM = {"type": "slurm", "machines": 2, "ranks_per_machine": 2}


def cluster(**values: Any) -> ClusterSection:
    return parse_config(ClusterSection, values, "cluster")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"machines": 2}, "type 'local' has no use for 'machines', which is of ray and slurm and attach"),
        ({"type": "ray", "ranks_per_machine": 2, "key_file": "k"}, "'ray' has no use for 'key_file'"),
        ({**SLURM, "type": "ray", "scheduling": {"gpu": 1}}, "'ray' has no use for 'scheduling'"),
        ({"type": "attach", "port": 1}, "type 'attach' needs ranks_per_machine"),
        ({"type": "slurm", "machines": 0}, "'machines' = 0"),
        ({"type": "kubernetes"}, "'type' = 'kubernetes'"),
        ({"nodes": 2}, "unknown field 'nodes'"),
        ({**SLURM, "scheduling": {"partitions": "p"}}, "did you mean 'partition'"),
        ({**SLURM, "scheduling": {"partition": "a\nb"}}, "scheduling.partition"),
        ({**SLURM, "scheduling": {"options": ["-p x"]}}, "scheduling.options.0"),
        ({**SLURM, "environment": ["A-B"]}, "environment.0"),
        ({**SLURM, "layouts": {1: {"dp": 2}}}, "layouts are those after a restart, and restarts = 0"),
        (
            {**SLURM, "restarts": 1, "layouts": {2: {"dp": 2}}},
            "layouts.2: machines = 2; a layout is for a smaller",
        ),
        ({**SLURM, "restarts": 1, "layouts": {1: {"dp": 4}}}, "layouts.1: dp4 has 4 ranks, .* room for 2"),
        ({"machines": 2, "port": 1}, "(?s)'machines'.*'port'"),
    ],
)
def test_a_wrong_cluster_section_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cluster(**values)


def test_written_defaults_are_read_again() -> None:
    for section in (cluster(restarts=2), cluster(**SLURM, restarts=1, layouts={1: {"dp": 2}})):
        assert cluster(**section.model_dump(mode="json")) == section


def test_a_number_is_a_time_limit_in_minutes() -> None:
    assert cluster(**SLURM, scheduling={"time_limit": 90}).scheduling.time_limit == "90"


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
    assert list(placement_problems(ranks, placement, cluster(**SLURM))) == []
    actual = place_ranks(ranks, placement, cluster(**SLURM))
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
    assert message in "\n".join(placement_problems(ranks, placement, cluster(**SLURM)))


def recipe(start: Path, output: Path, **changes: Any) -> Recipe:
    pytest.importorskip("core_rl_fsdp")
    fsdp = {"engine": "fsdp", "engines": {"fsdp": {"layout": {"dp": 4}}}, "cluster": SLURM}
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
    changes = {"engine": "fsdp", "engines": {"fsdp": {"layout": {"dp": 8}}}, "cluster": SLURM}
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
    assert "slurm, 2 machines with at most 2 ranks of a role each" in text
    assert "0, 1 of machines 0, 1" in text and "0, 1 of machines 1, 0" in text


def fewer(**cluster_changes: Any) -> dict[str, Any]:
    return {"cluster": SLURM | {"restarts": 1, "layouts": {1: {"dp": 2}}} | cluster_changes}


def test_plan_on_fewer_machines_has_their_layout(start: Path, tmp_path: Path) -> None:
    placement = {"reference": {"machines": [1, 0]}}
    plan = resolve(recipe(start, tmp_path / "out", placement=placement, **fewer()))
    assert plan.on_machines(2) is plan
    alone = plan.on_machines(1)
    assert alone.cluster.machines == 1 and alone.trainers["actor"].config.layout.dp == 2
    assert [alone.trainers[name].machines for name in ("actor", "reference")] == [(0,), (0,)]
    assert alone.schedule == plan.schedule and alone.data is plan.data


@pytest.mark.parametrize(
    ("layout", "placement", "message"),
    [
        ({"dp": 2}, {"critic": {"machines": [1]}}, r"critic = machines \[1\]: there is no machine 1"),
        ({"dp": 4}, {}, "critic: it has 4 ranks, and there is room for 2"),
    ],
)
def test_layout_for_fewer_machines_is_checked_early(
    start: Path, tmp_path: Path, layout: dict[str, int], placement: dict[str, Any], message: str
) -> None:
    algorithm = {"type_": "ppo", "args": {"kl_coef": 0.05}}
    changes = {"critic": {"layout": layout}, "algorithm": algorithm, "placement": placement}
    with pytest.raises(ConfigError, match=f"(?s)cluster.layouts: 1: .*{message}"):
        dry_run(recipe(start, tmp_path / "out", **changes, **fewer()))


def test_layout_unable_to_read_checkpoint_is_refused(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsdp = pytest.importorskip("core_rl_fsdp")
    fixed = replace(fsdp.SPEC, capabilities=fsdp.SPEC.capabilities - {Capability.RESHARDING})
    monkeypatch.setattr(fsdp, "SPEC", fixed)
    with pytest.raises(
        ConfigError, match="1: actor: .*'fsdp' does not declare 'resharding'.*save_portable_every"
    ):
        dry_run(recipe(start, tmp_path / "out", **fewer()))
    dry_run(recipe(start, tmp_path / "out", save_portable_every=2, **fewer()))
