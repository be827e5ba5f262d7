"""``core-rl submit``: the request to Slurm, by a stand-in for ``sbatch`` that records its arguments."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import training_support as support
from typer import Typer
from typer.testing import CliRunner

from core_rl.backend.meta import Scheduling
from core_rl.errors import ConfigError
from core_rl_trainer import load_recipe
from core_rl_trainer.cli.submit import submit as command
from core_rl_trainer.plan.resolve import resolve
from core_rl_trainer.recipe.recipe import Recipe
from core_rl_trainer.submission import machine_request, submit

SBATCH = """#!/bin/sh
echo "$@" > {record}
cp "$2" {record}.script
{answer}
"""
CLUSTER = {"machines": 2, "ranks_per_machine": 2, "restarts": 1, "environment": ["WANDB_MODE"]}


@pytest.fixture
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file with the arguments of ``sbatch``; next to it the script that it got."""
    return stand_in(tmp_path, monkeypatch, 'echo "4711;cluster"')


def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str) -> Path:
    record, program = tmp_path / "record", tmp_path / "bin" / "sbatch"
    program.parent.mkdir()
    program.write_text(SBATCH.format(record=record, answer=answer))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    return record


def values(start: Path, output: Path, **scheduling: Any) -> dict[str, Any]:
    pytest.importorskip("core_rl_fsdp")
    return support.recipe_values(
        start,
        output,
        engine="fsdp",
        engines={"fsdp": {"layout": {"dp": 4}}},
        cluster=CLUSTER | {"type": "slurm", "scheduling": scheduling},
    )


def options(record: Path) -> dict[str, str]:
    """The options in the script, as Slurm reads them."""
    lines = (record.parent / "record.script").read_text().splitlines()
    words = [shlex.split(line.removeprefix("#SBATCH "))[0] for line in lines if line.startswith("#SBATCH ")]
    return dict(word.removeprefix("--").partition("=")[::2] for word in words)


def test_submit_requests_resources_of_recipe(
    start: Path, tmp_path: Path, sbatch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduling = {
        "cpu": 16,
        "gpu": 2,
        "memory_mib": 4096,
        "partition": "gpu,big",
        "account": "lab",
        "qos": "high",
        "nodelist": "node[1-4]",
        "exclude": "node3",
        "env": {"NOTE": "it's on"},
        "time_limit": 90,
        "begin": "now+1hour",
        "deadline": "2030-01-31T08:00:00",
        "options": ["--constraint=h200"],
    }
    monkeypatch.chdir(tmp_path)
    output = tmp_path / "my run"
    recipe = support.write_recipe(tmp_path / "r.yaml", values(start, output, **scheduling))
    app = Typer()
    app.command()(command)
    done = CliRunner().invoke(app, ["r.yaml", "seed=3"])
    assert done.exit_code == 0, done.output
    assert "job 4711: 2 machines with 16 CPUs, 2 GPUs, 4,096 MiB each" in done.output
    assert f"output: {output}/slurm-4711.log" in done.output
    assert sbatch.read_text().strip() == f"--parsable {output}/submit.sh"
    assert options(sbatch) == {
        "job-name": "core-rl my run",
        "nodes": "2",
        "ntasks-per-node": "1",
        "cpus-per-task": "16",
        "gpus-per-node": "2",
        "mem": "4096M",
        "time": "90",
        "partition": "gpu,big",
        "account": "lab",
        "qos": "high",
        "nodelist": "node[1-4]",
        "exclude": "node3",
        "begin": "now+1hour",
        "deadline": "2030-01-31T08:00:00",
        "chdir": str(tmp_path),
        "output": f"{output}/slurm-%j.log",
        "signal": "B:USR1@120",
        "open-mode": "append",
        "no-kill": "",
        "constraint": "h200",
    }
    script = (output / "submit.sh").read_text()
    assert "export NOTE='it'\"'\"'s on'" in script
    subprocess.run(["bash", "-n", str(output / "submit.sh")], check=True)
    *_, last = script.strip().splitlines()
    _, *arguments = shlex.split(last.removeprefix("exec "))
    assert arguments[:4] == ["-m", "core_rl.cli", "train", str(recipe)]
    inside = load_recipe(recipe, arguments[4:])
    assert inside.seed == 3 and inside.cluster.type == "slurm"
    assert inside.cluster.environment == ("WANDB_MODE", "NOTE")


def prepared_request(recipe: Recipe) -> Any:
    plan = resolve(recipe.model_copy(update={"device": "auto"}), driver_here=False)
    return machine_request(plan, recipe.device)


def test_engines_declare_machine_resources(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsdp = pytest.importorskip("core_rl_fsdp.engine")
    needs = Scheduling(cpu=3, gpu=1, memory_mib=100, env=(("A", "1"),))
    monkeypatch.setattr(fsdp.FSDPBackend, "scheduling", lambda self, config: needs)
    request = prepared_request(load_recipe(values(start, tmp_path / "out")))
    # Two ranks of actor and reference each, which share devices; the rollout engine, of which the memory is not known.
    assert (request.cpu, request.gpu, request.memory_mib) == (2 * 2 * 3 + 1 + 1, 2, None)
    assert request.env == {"A": "1"}
    supervised = support.supervised_values(start, tmp_path / "out", "sft")
    fields = {name: values(start, tmp_path / "out")[name] for name in ("engine", "engines", "cluster")}
    request = prepared_request(load_recipe(supervised | fields))
    assert (request.cpu, request.gpu, request.memory_mib) == (2 * 3 + 1, 2, 200)


def test_submit_requests_gpus_from_cpu_machine(start: Path, tmp_path: Path) -> None:
    request = prepared_request(load_recipe(values(start, tmp_path / "out") | {"device": "cuda"}))
    assert request.gpu == 2


def test_submit_sets_cluster_type_slurm(start: Path, tmp_path: Path, sbatch: Path) -> None:
    settings = values(start, tmp_path / "out")
    del settings["cluster"]
    recipe = support.write_recipe(tmp_path / "r.yaml", settings)
    job, request = submit(recipe, ["cluster.machines=2", "cluster.ranks_per_machine=2"])
    assert job.number == "4711" and request.machines == 2
    assert "no-kill" not in options(sbatch) and "time" not in options(sbatch)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"cluster": {"type": "ray", "ranks_per_machine": 4}},
            "cluster.type = 'ray': core-rl submit is for Slurm",
        ),
        (
            {"cluster": {"type": "slurm", "ranks_per_machine": 1}},
            "actor: it has 4 ranks, and there is room for 1",
        ),
        ({"steps": 0}, "'steps' = 0"),
    ],
)
def test_a_wrong_recipe_is_not_submitted(
    start: Path, tmp_path: Path, sbatch: Path, changes: dict[str, Any], message: str
) -> None:
    recipe = support.write_recipe(tmp_path / "r.yaml", values(start, tmp_path / "out") | changes)
    with pytest.raises(ConfigError, match=message):
        submit(recipe, [])
    assert not sbatch.exists() and not (tmp_path / "out").exists()


def test_sbatch_error_is_shown(start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch, 'echo "sbatch: error: invalid partition specified: x" >&2; exit 1')
    recipe = support.write_recipe(tmp_path / "r.yaml", values(start, tmp_path / "out", partition="x"))
    with pytest.raises(ConfigError, match=r"invalid partition specified: x\nfix: change cluster.scheduling"):
        submit(recipe, [])


def test_without_slurm_the_script_is_kept(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    recipe = support.write_recipe(tmp_path / "r.yaml", values(start, tmp_path / "out"))
    with pytest.raises(ConfigError, match="sbatch was not found: run core-rl submit on a login node"):
        submit(recipe, [])
    assert (tmp_path / "out" / "submit.sh").is_file()


def test_without_the_cluster_package_nothing_is_submitted(
    start: Path, tmp_path: Path, sbatch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("core_rl.launch.hosts.declared_in", lambda group: iter(()))
    recipe = support.write_recipe(tmp_path / "r.yaml", values(start, tmp_path / "out"))
    with pytest.raises(
        ConfigError, match=r"cluster.type = 'slurm': .* run: pip install 'core-rl\[cluster\]'"
    ):
        submit(recipe, [])
    assert not sbatch.exists()
