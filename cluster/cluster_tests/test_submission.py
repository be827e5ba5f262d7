"""``core-rl submit`` to real Slurm: the job trains, and Slurm gets the request of the recipe."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import training_support as support
from pretend_machines import Machine, within
from slurm_daemons import Slurm

from core_rl.errors import ConfigError
from core_rl_cluster.sbatch import BatchJob
from core_rl_trainer import train
from core_rl_trainer.submission import submit

pytestmark = pytest.mark.nightly

ENDED_S = 300.0
AMOUNTS = {"cpu": 2, "memory_mib": 1000}
TOMORROW = f"{datetime.now().astimezone() + timedelta(days=1):%Y-%m-%dT12:00:00}"
AFTER_TOMORROW = f"{datetime.now().astimezone() + timedelta(days=2):%Y-%m-%dT12:00:00}"


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return support.make_start(tmp_path_factory.mktemp("start"))


@pytest.fixture
def values(
    slurm: Slurm, start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, Any]]:
    """A recipe for two machines, in the environment of a login node."""
    for name, value in slurm.environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    changes = {"engine": "fsdp", "engines": {"fsdp": {"layout": {"dp": 2}}}, "steps": 2, "save_every": 2}
    yield support.supervised_values(start, tmp_path / "many", "sft", **changes)
    slurm.command("scancel", "--full", "--user=root")


def submitted(values: dict[str, Any], directory: Path, **scheduling: Any) -> BatchJob:
    section = {"type": "slurm", "machines": 2, "ranks_per_machine": 1, "scheduling": AMOUNTS | scheduling}
    recipe = support.write_recipe(directory / "submitted.yaml", values | {"cluster": section})
    return submit(recipe, [])[0]


def shown(slurm: Slurm, job: str) -> dict[str, str]:
    """The fields of ``scontrol show job``."""
    return dict(re.findall(r"(\S+?)=(\S*)", slurm.command("scontrol", "show", "job", job)))


def test_a_submitted_job_trains_and_ends(
    slurm: Slurm, slurm_machines: list[Machine], values: dict[str, Any], tmp_path: Path
) -> None:
    before = [set(machine.processes()) for machine in slurm_machines]
    train(values | {"output_dir": str(tmp_path / "one")})
    submission = submitted(values, tmp_path, time_limit="10", exclude="node2")

    def ended() -> bool:
        return shown(slurm, submission.number)["JobState"] not in ("PENDING", "RUNNING", "COMPLETING")

    assert within(ended, ENDED_S), submission.log.read_text()
    assert shown(slurm, submission.number)["JobState"] == "COMPLETED", submission.log.read_text()
    assert json.loads((tmp_path / "many" / "result.json").read_text())["steps"] == 2
    losses = [
        [row["loss"] for row in support.curve(tmp_path / name) if "loss" in row] for name in ("many", "one")
    ]
    assert losses[0] == losses[1] != []
    assert within(lambda: [set(machine.processes()) for machine in slurm_machines] == before)


@pytest.mark.parametrize(
    ("scheduling", "expected"),
    [
        ({"time_limit": "90"}, {"TimeLimit": "01:30:00"}),
        ({"time_limit": "1-12"}, {"TimeLimit": "1-12:00:00"}),
        ({"begin": TOMORROW}, {"EligibleTime": TOMORROW}),
        ({"deadline": AFTER_TOMORROW}, {"Deadline": AFTER_TOMORROW}),
        ({"partition": "pretend"}, {"Partition": "pretend"}),
        ({"nodelist": "node[1-2]"}, {"ReqNodeList": "node[1-2]"}),
        ({"exclude": "node1"}, {"ExcNodeList": "node1"}),
        ({"options": ["--comment=nightly"]}, {"Comment": "nightly"}),
        ({}, {"NumNodes": "2", "CPUs/Task": "2", "MinMemoryNode": "1000M", "JobName": "core-rl"}),
    ],
)
def test_fields_of_the_recipe_reach_slurm(
    slurm: Slurm,
    values: dict[str, Any],
    tmp_path: Path,
    scheduling: dict[str, Any],
    expected: dict[str, str],
) -> None:
    job = submitted(values, tmp_path, **{"begin": TOMORROW, "time_limit": "30", **scheduling}).number
    fields = shown(slurm, job)
    assert {name: fields.get(name, "").removesuffix("-2") for name in expected} == expected
    assert fields["WorkDir"] == str(Path.cwd())


def test_variables_of_the_recipe_reach_the_job(slurm: Slurm, values: dict[str, Any], tmp_path: Path) -> None:
    job = submitted(values, tmp_path, begin=TOMORROW, env={"GREETING": "hello 'world'"}).number
    script = slurm.command("scontrol", "write", "batch_script", job, "-")
    assert """export GREETING='hello '"'"'world'"'"''""" in script
    assert "'cluster.environment=[GREETING]'" in script


@pytest.mark.parametrize(
    ("scheduling", "message"),
    [
        ({"partition": "nosuch"}, "invalid partition"),
        ({"nodelist": "node9"}, "Invalid node name"),
        ({"time_limit": "soon"}, "Invalid --time specification"),
        ({"begin": "someday"}, "begin"),
        ({"deadline": "2001-01-01T00:00:00", "time_limit": "10"}, "time limit is invalid"),
        ({"options": ["--nosuch"]}, "nosuch"),
    ],
)
def test_refusals_of_sbatch_are_shown(
    values: dict[str, Any], tmp_path: Path, scheduling: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)sbatch refused the job: .*({message}).*fix: change cluster"):
        submitted(values, tmp_path, **scheduling)
