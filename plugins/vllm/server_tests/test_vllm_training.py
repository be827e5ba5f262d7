"""Training runs with completions of a real server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from server_faults_support import Fault, check_faulty_run, hung, killed, restarted, slow, stalled
from server_training_support import check_sixty_steps, run, running_recipe, server_recipe, server_start
from vllm_support import backend_of, build, tiny_model

from core_rl.engine.inference import InferenceEngine

STEPS, GROUP = 3, 3
ASYNCHRONOUS = {"group_size": GROUP, "max_new_tokens": 16, "max_head_offpolicyness": 1, "sync": "distributed"}


@pytest.fixture
def start(root: Path, tmp_path: Path) -> Path:
    """Prompts and a tokenizer for the model that servers have."""
    return server_start(tiny_model(root), tmp_path / "start")


def values(start: Path, output: Path, engine: InferenceEngine, sync: str) -> dict[str, Any]:
    return running_recipe(start, output, engine, {}, group_size=GROUP, sync=sync) | {"steps": STEPS}


@pytest.mark.parametrize("sync", ["tensor", "distributed", "disk"])
def test_trained_weights_are_served(engine: InferenceEngine, start: Path, tmp_path: Path, sync: str) -> None:
    rows = run(values(start, tmp_path / "out", engine, sync))
    assert [row["version"] for row in rows] == [1, 2, 3]
    assert all(row["update_successful"] == 1 and 0 < row["mismatch_max"] < 1e-4 for row in rows)


@pytest.mark.nightly
@pytest.mark.parametrize("sync", ["disk", "tensor", "distributed", "lora"])
def test_sixty_steps_raise_the_reward(
    request: pytest.FixtureRequest,
    start: Path,
    tmp_path: Path,
    sync: str,
    record_testsuite_property: Callable[[str, object], None],
) -> None:
    engine = request.getfixturevalue("adapted" if sync == "lora" else "engine")
    # On CPUs, vLLM 0.32.0 with --enable-lora dies of a request for the log-probs of a prompt.
    scores = sync != "lora"
    check_sixty_steps(values(start, tmp_path / "out", engine, sync), record_testsuite_property, scores=scores)


@pytest.mark.nightly
@pytest.mark.parametrize("faults", [{2: killed, 4: stalled, 6: slow}, {2: hung}], ids=["short", "hung"])
def test_server_faults_lose_no_completion(start: Path, tmp_path: Path, faults: dict[int, Fault]) -> None:
    limits = {"request_timeout_s": 240, "update_timeout_s": 30} if hung in faults.values() else {}
    servers = {"layout": {"dp": 2}, "options": limits}
    recipe = server_recipe(start, tmp_path / "out", "vllm", servers, **ASYNCHRONOUS)
    check_faulty_run(recipe | {"steps": max(faults) + 2}, faults)


@pytest.mark.nightly
def test_servers_restarted_elsewhere_rejoin(root: Path, start: Path, tmp_path: Path) -> None:
    engine = build(tiny_model(root), dp=2)
    try:
        engine.launch_server()
        owners = {server.address: server for server in backend_of(engine).servers}
        recipe = running_recipe(start, tmp_path / "out", engine, {}, **ASYNCHRONOUS)
        check_faulty_run(recipe | {"steps": 6}, {2: restarted, 4: restarted}, owners)
    finally:
        engine.destroy()
