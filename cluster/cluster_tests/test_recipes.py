"""Recipes on machines of a Ray cluster train as on one machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import training_support as runs
from pretend_machines import within
from ray_cluster import Cluster
from rich.console import Console

from core_rl_trainer import train
from core_rl_trainer.export import export_checkpoint

pytestmark = pytest.mark.nightly

FSDP = {"engine": "fsdp", "engines": {"fsdp": {"layout": {"dp": 4}}}}
SERVERS: dict[str, tuple[str, dict[str, Any]]] = {
    "sglang": ("CORE_RL_SGLANG_PYTHON", {}),
    "vllm": ("CORE_RL_VLLM_PYTHON", {"private_network": True}),
}


def section(**changes: Any) -> dict[str, Any]:
    return {"type": "ray", "machines": 2, "ranks_per_machine": 2, "wait_s": 120.0, "lease_s": 10.0, **changes}


def curve(values: dict[str, Any]) -> list[Any]:
    train(values, console=Console(quiet=True))
    return runs.curve(Path(values["output_dir"]))


@pytest.mark.parametrize("sync", ["disk", "distributed"])
def test_curves_on_two_machines_equal_the_local_curve(
    cluster: Cluster, start: Path, tmp_path: Path, sync: str
) -> None:
    rollout = {"prompts_per_step": 6, "group_size": 3, "max_new_tokens": 4, "sync": sync}
    changes = FSDP | {"rollout": rollout, "steps": 2}
    expected = curve(runs.recipe_values(start, tmp_path / "one", **changes))
    changes["cluster"] = section()
    assert curve(runs.recipe_values(start, tmp_path / "many", **changes)) == expected
    export_checkpoint(tmp_path / "many", "hf", tmp_path / "exported")
    assert (tmp_path / "exported" / "model.safetensors").exists()
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
    changes = FSDP | {"rollout": rollout, "steps": 2, "algorithm": {"type": "ppo_actor"}}
    changes["engines"] = {**FSDP["engines"], server: section_of_server}  # type: ignore[dict-item]
    changes["placement"] = {"actor": {"machines": [0, 1]}, "rollout": {"machines": [2]}}
    changes["cluster"] = section(machines=3)
    rows = curve(runs.recipe_values(start, tmp_path / "served", **changes))
    # Both sides agree on log-probs, so the server has the trainer's weights.
    gaps = [row["mismatch_max"] for row in rows if "mismatch_max" in row]
    assert gaps
    assert max(gaps) < 1e-4
    assert within(lambda: not cluster.left()), cluster.left()
