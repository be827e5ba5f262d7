"""Training with completions of real servers, compared with the oracle after each weight sync."""

from __future__ import annotations

import io
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import training_support as support
from rich.console import Console
from torch import Tensor

from core_rl.backend.meta import SaveLoadMeta
from core_rl.data.batch import SequenceBatch
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.engine.inference import InferenceEngine
from core_rl.servers.backend import ServerBackend
from core_rl.servers.server import Server
from core_rl_conformance.expected_values import ExpectedValues, Snapshot
from core_rl_conformance.inputs.data import ragged
from core_rl_trainer import train
from core_rl_trainer.run.engines import Roles
from core_rl_trainer.run.online import OnlineLearner
from core_rl_trainer.run.rollouts import Rollouts

PROMPTS, GROUP, STEPS = 6, 8, 60
LR, LR_ADAPTER = 3e-4, 3e-3
DATA = ragged(151, seed=5, lengths=(9, 1, 30, 17, 2))
MISMATCH = 1e-4
"""Limit of the difference of the log-probs of sampled tokens."""
EDGE = 5
"""Steps at the beginning and at the end whose rewards are compared."""


def server_start(model: str, directory: Path) -> Path:
    """Prompts and a tokenizer for ``model``, which servers have."""
    start = support.make_start(directory)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(Path(model, name), start / "model" / name)
    return start


def server_recipe(
    start: Path, output: Path, engine: str, settings: Mapping[str, Any], **rollout: Any
) -> dict[str, Any]:
    """A recipe with rollouts of ``engine``, whose section is ``settings``."""
    selected = {"engine": engine, "sync": "tensor", "prompts_per_step": PROMPTS, "max_new_tokens": 4}
    return support.recipe_values(
        start,
        output,
        engine="fsdp",
        engines={engine: dict(settings)},
        rollout=selected | rollout,
        algorithm={"type": "ppo_actor", "args": {"kl_coef": 0.0}},
    )


def running_recipe(
    start: Path, output: Path, engine: InferenceEngine, options: Mapping[str, Any], **rollout: Any
) -> dict[str, Any]:
    """A recipe that trains with the servers of ``engine``, and the adapter that it takes."""
    addresses = [server.address for server in servers_of(engine)]
    settings = {"options": {"addresses": addresses, "take_over": True, **options}}
    recipe = server_recipe(start, output, engine.spec.name, settings, **rollout)
    lora = engine.config.model.lora
    if lora is not None:
        recipe["model"]["lora"] = lora.model_dump(mode="json")
    return recipe


def run(recipe: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of the metrics after step 0."""
    output = Path(recipe["output_dir"])
    train(support.write_recipe(output.with_suffix(".yaml"), recipe), [], console=Console(file=io.StringIO()))
    return support.curve(output)[1:]


def servers_of(engine: InferenceEngine) -> tuple[Server, ...]:
    """The servers of ``engine``."""
    backend = engine._backend
    assert isinstance(backend, ServerBackend)
    return backend.servers


def each_score(engine: InferenceEngine, batch: SequenceBatch) -> Iterator[Tensor]:
    """The scores of ``batch`` by each server; asserts that all are ready."""
    servers = servers_of(engine)
    assert all(server.ready for server in servers)
    for selected in servers:
        for server in servers:
            server.ready = server is selected
        yield engine.score(batch)
    for server in servers:
        server.ready = True


@dataclass
class Published:
    """After each sync, compares the trainer and every server with the oracle at the trained weights."""

    directory: Path
    scores: bool = True
    """Whether servers can score; without it, only the trainer is compared here."""
    versions: list[int] = field(default_factory=list)
    """The version of each sync."""
    differences: list[float] = field(default_factory=list)
    """The largest difference of the trainer's and a server's log-probs after each sync."""
    shares: list[float] = field(default_factory=list)
    """The same as parts of the limit."""
    changes: list[float] = field(default_factory=list)
    """The largest change of the trainer's log-probs by each version, as parts of the limit."""

    def __post_init__(self) -> None:
        self._expected = ExpectedValues(self.directory / "expected_values")
        self._last: Tensor | None = None

    def exported(self, version: int) -> Path:
        """The model directory with the trained weights of ``version``."""
        return self.directory / "exported" / str(version)

    def verify(self, roles: Roles, version: int) -> None:
        """Assert that all log-probs are within the suite's limit, and that the engine has ``version``."""
        exported = self.exported(version)
        roles.actor.save(SaveLoadMeta(path=str(exported), format="hf"))
        expected = self._expected.outputs(Snapshot(exported), DATA, "logprobs", 1.0, torch.float32)
        truth, limit = torch.cat(expected.values), expected.tolerance.limit
        trained = roles.actor.forward(DATA.batch(), MicroBatchSpec(max_tokens=4096))["logprobs"]
        served = list(each_score(roles.rollout, DATA.batch())) if self.scores else []
        for actual in (trained, *served):
            assert float((actual.double() - truth).abs().max()) <= limit
        difference = max((float((actual - trained).abs().max()) for actual in served), default=0.0)
        assert difference <= 2 * limit
        assert roles.rollout.get_version() == version
        self.versions.append(version)
        self.differences.append(difference)
        self.shares.append(difference / (2 * limit))
        if self._last is not None:
            self.changes.append(float((trained - self._last).abs().max()) / (2 * limit))
        self._last = trained


@contextmanager
def publishing(directory: Path, *, scores: bool = True) -> Iterator[Published]:
    """The comparisons after each sync of runs."""
    published, publish = Published(directory, scores), OnlineLearner.sync

    def verified(loop: OnlineLearner, version: int) -> None:
        publish(loop, version)
        published.verify(loop.roles, version)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OnlineLearner, "sync", verified)
        yield published


@contextmanager
def recording() -> Iterator[list[SequenceBatch]]:
    """The batch of each training step of runs."""
    batches: list[SequenceBatch] = []
    inner = Rollouts.training_batch

    def recorded(rollouts: Rollouts, step: int, prompts: Any) -> SequenceBatch:
        batches.append(inner(rollouts, step, prompts))
        return batches[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rollouts, "training_batch", recorded)
        yield batches


def require_each_once(batches: list[SequenceBatch], group: int) -> None:
    """The prompts were trained on in order of their numbers, each with ``group`` completions."""
    completions = sorted(number for batch in batches for number in batch["group"].tolist())
    assert completions == sorted(list(range(len(batches) * PROMPTS)) * group)


def check_sixty_steps(
    recipe: dict[str, Any], record: Callable[[str, object], None], *, scores: bool = True
) -> None:
    """Train a synchronous run of 60 steps, of which each is compared; ``record`` gets the figures of the run.

    Without ``scores`` the servers are compared by the log-probs of their completions alone.
    """
    output, lora = Path(recipe["output_dir"]), recipe["rollout"]["sync"] == "lora"
    # The reward rises in all steps, so that all versions differ.
    optimizer = {"lr": LR_ADAPTER if lora else LR}
    recipe = recipe | {"steps": STEPS, "save_every": STEPS, "eval_every": STEPS, "optimizer": optimizer}
    recipe["rollout"] = recipe["rollout"] | {"group_size": GROUP}
    started = time.monotonic()
    with publishing(output.parent, scores=scores) as published, recording() as batches:
        rows = run(recipe)
    rewards = [row["reward"] for row in rows]
    figures = {
        "steps": len(rows),
        "seconds": round(time.monotonic() - started),
        "reward": [round(sum(part) / EDGE, 2) for part in (rewards[:EDGE], rewards[-EDGE:])],
        "largest difference": max(published.differences),
        "part of the limit": max(published.shares),
        "smallest change by a step": min(published.changes),
        "sampled tokens": max(row["mismatch_max"] for row in rows),
    }
    record(f"{recipe['rollout']['engine']} {recipe['rollout']['sync']}", json.dumps(figures))
    assert published.versions == list(range(STEPS + 1))
    assert min(published.changes) > 1, "servers with older weights would be over the limit"
    for step, batch in enumerate(batches, 1):
        assert set(batch["versions"][batch.loss_mask].tolist()) == {step - 1}
    assert [row["version"] for row in rows] == list(range(1, STEPS + 1))
    assert all(row["update_successful"] == 1 and 0 < row["mismatch_max"] < MISMATCH for row in rows)
    require_each_once(batches, GROUP)
    assert sum(rewards[-EDGE:]) > 2 * sum(rewards[:EDGE])
