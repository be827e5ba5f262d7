"""Training runs with completions of real servers, which serve the trained weights, also after they were killed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from server_faults_support import Fault, check_faulty_run, hung, killed, restarted, slow, stalled
from server_training_support import (
    Published,
    check_sixty_steps,
    publishing,
    recording,
    require_each_once,
    run,
    running_recipe,
    server_recipe,
    server_start,
)
from sglang_support import API_KEY, backend_of, build, tiny_model

from core_rl.data.batch import SequenceBatch
from core_rl.engine.inference import InferenceEngine

STEPS, GROUP = 3, 3
ASYNCHRONOUS = {"group_size": GROUP, "max_new_tokens": 16, "max_head_offpolicyness": 1, "sync": "distributed"}


@pytest.fixture
def start(root: Path, tmp_path: Path) -> Path:
    """Prompts and a tokenizer for the model that servers have."""
    return server_start(tiny_model(root), tmp_path / "start")


@pytest.fixture
def published(tmp_path: Path) -> Iterator[Published]:
    """The comparisons after each sync of the run."""
    with publishing(tmp_path) as published:
        yield published


@pytest.fixture
def trained() -> Iterator[list[SequenceBatch]]:
    """The batch of each step."""
    with recording() as batches:
        yield batches


def values(start: Path, output: Path, engine: InferenceEngine, **rollout: Any) -> dict[str, Any]:
    options = {"api_key": API_KEY}
    return running_recipe(start, output, engine, options, group_size=GROUP, **rollout) | {"steps": STEPS}


def test_trained_weights_are_served(
    engine: InferenceEngine, start: Path, tmp_path: Path, published: Published, trained: list[SequenceBatch]
) -> None:
    rows = run(values(start, tmp_path / "out", engine))
    assert published.versions == [0, 1, 2, 3]
    assert [row["version"] for row in rows] == [1, 2, 3]
    assert all(row["staleness_max"] == 0 and row["update_successful"] == 1 for row in rows)
    assert all(0 < row["mismatch_max"] < 1e-4 for row in rows)
    require_each_once(trained, GROUP)


@pytest.mark.nightly
def test_adapter_is_served_as_trained(
    adapted: InferenceEngine, start: Path, tmp_path: Path, published: Published
) -> None:
    output = tmp_path / "out"
    rows = run(values(start, output, adapted, sync="lora"))
    assert published.versions == [0, 1, 2, 3]
    assert all(row["update_successful"] == 1 and 0 < row["mismatch_max"] < 1e-4 for row in rows)
    assert not [path.name for path in output.rglob("*.adapter-*")], "files of adapters are removed"


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
    check_sixty_steps(values(start, tmp_path / "out", engine, sync=sync), record_testsuite_property)


@pytest.mark.nightly
@pytest.mark.parametrize("faults", [{2: killed, 4: stalled, 6: slow}, {2: hung}], ids=["short", "hung"])
def test_server_faults_lose_no_completion(start: Path, tmp_path: Path, faults: dict[int, Fault]) -> None:
    limits = {"request_timeout_s": 240, "update_timeout_s": 30} if hung in faults.values() else {}
    servers = {"layout": {"dp": 2}, "options": limits}
    recipe = server_recipe(start, tmp_path / "out", "sglang", servers, **ASYNCHRONOUS)
    check_faulty_run(recipe | {"steps": max(faults) + 2}, faults)


@pytest.mark.nightly
def test_servers_restarted_elsewhere_rejoin(root: Path, start: Path, tmp_path: Path) -> None:
    engine = build(tiny_model(root), dp=2, api_key=API_KEY)
    try:
        engine.launch_server()
        owners = {server.address: server for server in backend_of(engine).servers}
        recipe = running_recipe(start, tmp_path / "out", engine, {"api_key": API_KEY}, **ASYNCHRONOUS)
        check_faulty_run(recipe | {"steps": 6}, {2: restarted, 4: restarted}, owners)
    finally:
        engine.destroy()
