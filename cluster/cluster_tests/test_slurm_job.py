"""The job script of the page, run by real Slurm on pretend machines."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import training_support as runs
from pretend_machines import REPOSITORY, pretend_machines, within
from rich.console import Console
from slurm_daemons import slurm_daemons

from core_rl_trainer import train

PAGE = REPOSITORY / "docs" / "many-machines.md"
ENDED_S = 240.0


def job_script() -> str:
    """The script of the page, without GPUs, which these machines do not have."""
    (script,) = re.findall(r'```sh title="job.sh"\n(.*?)```', PAGE.read_text(), re.DOTALL)
    return str(script).replace("#SBATCH --gpus-per-node=8\n", "")


def test_the_job_script_of_the_page_trains(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    changes = {"engine": "fsdp", "engines": {"fsdp": {"layout": {"dp": 2}}}, "steps": 2}
    train(runs.supervised_values(start, tmp_path / "one", "sft", **changes), console=Console(quiet=True))
    many = tmp_path / "many"
    section = {"type": "ray", "ranks_per_machine": 1}
    values = runs.supervised_values(start, many, "sft", **changes, cluster=section)
    runs.write_recipe(tmp_path / "recipe.yaml", values)
    (tmp_path / "job.sh").write_text(job_script())
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        monkeypatch.delenv(name)
    bin_folder, modules = Path(sys.executable).parent, os.pathsep.join(filter(None, sys.path))
    env = {"PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": modules}
    with (
        pretend_machines(2, [tmp_path, start]) as machines,
        slurm_daemons(machines, tmp_path / "slurm") as slurm,
    ):
        options = ["--parsable", f"--chdir={tmp_path}", f"--output={tmp_path}/job.log"]
        done = subprocess.run(
            ["sbatch", *options, "job.sh"], cwd=tmp_path, env={**os.environ, **slurm.environ, **env},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        number = done.stdout.strip()

        def state() -> str:
            (text,) = re.findall(r"JobState=(\S+)", slurm.command("scontrol", "show", "job", number))
            return str(text)

        ended = within(lambda: state() not in ("PENDING", "RUNNING", "COMPLETING"), ENDED_S)
        log = (tmp_path / "job.log").read_text()
        assert ended and state() == "COMPLETED", log
        assert within(
            lambda: not any("ray" in line for machine in machines for line in machine.processes().values())
        )
    assert json.loads((many / "result.json").read_text())["steps"] == 2
    assert [row.get("loss") for row in runs.curve(many)] == [
        row.get("loss") for row in runs.curve(tmp_path / "one")
    ]
