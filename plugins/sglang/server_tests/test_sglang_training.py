"""Training runs with completions of real servers, which serve the trained weights, also after they were killed."""

from __future__ import annotations

import io
import os
import random
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import training_support as support
from rich.console import Console
from sglang_support import API_KEY, backend_of, tiny_model
from torch import Tensor

from core_rl.backend.meta import SaveLoadMeta
from core_rl.data.batch import SequenceBatch
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.engine.inference import InferenceEngine
from core_rl_conformance.expected_values import ExpectedValues, Snapshot
from core_rl_conformance.inputs.data import ragged
from core_rl_trainer import train
from core_rl_trainer.run.engines import Roles
from core_rl_trainer.run.online import OnlineLearner
from core_rl_trainer.run.rollouts import Rollouts

STEPS, PROMPTS, GROUP = 3, 6, 3
DATA = ragged(151, seed=5, lengths=(9, 1, 30, 17, 2))


@pytest.fixture
def start(root: Path, tmp_path: Path) -> Path:
    """Prompts and a tokenizer for the model that servers have."""
    start = support.make_start(tmp_path / "start")
    for name in ("config.json", "model.safetensors"):
        shutil.copy(Path(tiny_model(root), name), start / "model" / name)
    return start


def values(start: Path, output: Path, sglang: dict[str, Any], **rollout: Any) -> dict[str, Any]:
    selected = {"engine": "sglang", "sync": "tensor", "prompts_per_step": PROMPTS, "group_size": GROUP}
    return support.recipe_values(
        start,
        output,
        engine="fsdp",
        engines={"sglang": sglang},
        rollout=selected | {"max_new_tokens": 4, **rollout},
        algorithm={"type_": "ppo_actor", "args": {"kl_coef": 0.0}},
        steps=STEPS,
    )


def run(recipe: Path, output: Path) -> list[dict[str, Any]]:
    """The rows of the metrics after step 0."""
    train(recipe, [], console=Console(file=io.StringIO()))
    return support.curve(output)[1:]


class Published:
    """After each sync, compares the trainer and every server with the oracle at the trained weights."""

    def __init__(self, directory: Path) -> None:
        self.versions: list[int] = []
        self._expected = ExpectedValues(directory / "expected_values")
        self._directory = directory / "exported"

    def verify(self, roles: Roles, version: int) -> None:
        roles.actor.save(SaveLoadMeta(path=str(self._directory), format="hf"))
        expected = self._expected.outputs(Snapshot(self._directory), DATA, "logprobs", 1.0, torch.float32)
        limit = expected.tolerance.limit
        spec = MicroBatchSpec(max_tokens=4096)
        trained = roles.actor.forward(DATA.batch(), spec)["logprobs"]
        served = list(each_score(roles.rollout, DATA.batch()))
        for got in (trained, *served):
            assert float((got.double() - torch.cat(expected.values)).abs().max()) <= limit
        for got in served:
            assert float((got - trained).abs().max()) <= 2 * limit
        assert roles.rollout.get_version() == version
        self.versions.append(version)


def each_score(engine: InferenceEngine, batch: SequenceBatch) -> Iterator[Tensor]:
    """The scores of ``batch`` by each server; asserts that all are ready."""
    servers = backend_of(engine).servers
    assert all(server.ready for server in servers)
    for selected in servers:
        for server in servers:
            server.ready = server is selected
        yield engine.score(batch)
    for server in servers:
        server.ready = True


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Published:
    """The comparisons after each sync of the run."""
    actual = Published(tmp_path)
    publish = OnlineLearner.sync

    def verified(loop: OnlineLearner, version: int) -> None:
        publish(loop, version)
        actual.verify(loop.roles, version)

    monkeypatch.setattr(OnlineLearner, "sync", verified)
    return actual


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The numbers of the prompts that steps trained on, once for each of their completions."""
    steps: list[list[int]] = []
    inner = Rollouts.training_batch

    def recorded(rollouts: Rollouts, step: int, batches: Any) -> SequenceBatch:
        batch = inner(rollouts, step, batches)
        steps.append(sorted(batch["group"].tolist()))
        return batch

    monkeypatch.setattr(Rollouts, "training_batch", recorded)
    return steps


def require_each_once(trained: list[list[int]]) -> None:
    completions = sorted(number for step in trained for number in step)
    assert completions == sorted(list(range(STEPS * PROMPTS)) * GROUP)


def test_trained_weights_are_served(
    engine: InferenceEngine, start: Path, tmp_path: Path, published: Published, trained: list[list[int]]
) -> None:
    address = backend_of(engine).servers[0].address
    options = {"addresses": [address], "take_over": True, "api_key": API_KEY}
    output = tmp_path / "out"
    recipe = support.write_recipe(tmp_path / "r.yaml", values(start, output, {"options": options}))
    rows = run(recipe, output)
    assert published.versions == [0, 1, 2, 3]
    assert [row["version"] for row in rows] == [1, 2, 3]
    assert all(row["staleness_max"] == 0 and row["update_successful"] == 1 for row in rows)
    assert all(0 < row["mismatch_max"] < 1e-4 for row in rows)
    require_each_once(trained)


def test_adapter_is_served_as_trained(
    adapted: InferenceEngine, start: Path, tmp_path: Path, published: Published
) -> None:
    address = backend_of(adapted).servers[0].address
    options = {"addresses": [address], "take_over": True, "api_key": API_KEY}
    output = tmp_path / "out"
    lora = adapted.config.model.lora
    assert lora is not None
    changed = values(start, output, {"options": options}, sync="lora") | {
        "model": {"path": str(start / "model"), "lora": lora.model_dump(mode="json")}
    }
    rows = run(support.write_recipe(tmp_path / "r.yaml", changed), output)
    assert published.versions == [0, 1, 2, 3]
    assert all(row["update_successful"] == 1 and 0 < row["mismatch_max"] < 1e-4 for row in rows)
    assert not [path.name for path in output.rglob("*.adapter-*")], "files of adapters are removed"


@pytest.mark.nightly
def test_killed_servers_lose_no_sample(
    start: Path,
    tmp_path: Path,
    published: Published,
    trained: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng, killed = random.Random(0), list[int]()
    inner = Rollouts.training_batch

    def beset(rollouts: Rollouts, step: int, batches: Any) -> SequenceBatch:
        if step != 2:
            return inner(rollouts, step, batches)
        engine = rollouts.engine
        process = rng.choice(backend_of(engine).servers).process
        assert process is not None
        killed.append(process.pid)
        timer = threading.Timer(rng.uniform(0.0, 0.05), os.kill, (process.pid, signal.SIGKILL))
        timer.start()
        try:
            return inner(rollouts, step, batches)
        finally:
            timer.join()

    monkeypatch.setattr(Rollouts, "training_batch", beset)
    output = tmp_path / "out"
    sglang = {"layout": {"dp": 2}}
    changed = values(start, output, sglang, max_head_offpolicyness=1, sync="distributed")
    rows = run(support.write_recipe(tmp_path / "r.yaml", changed), output)
    assert killed
    assert published.versions == [0, 1, 2, 3], "each server, the new one too, had the weights of each version"
    assert [row["version"] for row in rows] == [1, 2, 3]
    assert all(row["staleness_max"] <= 1 for row in rows)
    require_each_once(trained)
