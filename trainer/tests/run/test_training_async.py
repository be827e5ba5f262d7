"""Asynchronous runs: staleness of trained prompts, resumes, and names of recipes for rollouts."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import stepwise_rollout
import torch
import training_support as support
from stepwise_rollout import StepwiseRollout

from core_rl.backend.meta import WeightUpdateMeta
from core_rl.checkpoint.run import RunCheckpoints
from core_rl.config.capability import Capability
from core_rl.config.engine import ModelConfig
from core_rl.data.batch import SequenceBatch
from core_rl.data.requests import SamplingParams
from core_rl.engine.inference import InferenceEngine
from core_rl.errors import BatchError, RolloutError, UnsupportedCapability
from core_rl.reference import ReferenceRolloutConfig
from core_rl.registry.engines import register_engine
from core_rl_trainer.rewards.functions import rewards_differ
from core_rl_trainer.run.online import NAMES, OnlineLearner, interrupted
from core_rl_trainer.run.rollouts import Rollouts
from core_rl_trainer.workflows.episodes import SingleTurnWorkflow

ASYNC = ["rollout.max_head_offpolicyness=2"]


@pytest.fixture(scope="module")
def start(start: Path) -> Iterator[Path]:
    with register_engine(stepwise_rollout.SPEC):  # a worker may begin with this module twice
        yield start


@pytest.fixture
def recipe(start: Path, tmp_path: Path) -> Path:
    return support.write_recipe(tmp_path / "r.yaml", support.recipe_values(start, tmp_path / "out"))


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[int]]]:
    """The steps that were taken, each with the numbers of its prompts."""
    steps: list[tuple[int, list[int]]] = []
    inner = Rollouts.training_batch

    def recorded(rollouts: Rollouts, step: int, batches: Any) -> SequenceBatch:
        batch = inner(rollouts, step, batches)
        steps.append((step, batch["group"].unique().tolist()))
        return batch

    monkeypatch.setattr(Rollouts, "training_batch", recorded)
    return steps


def run(recipe: Path, *overrides: str) -> list[dict[str, Any]]:
    """The rows of the metrics after step 0."""
    support.run(recipe, *overrides)
    return support.curve(recipe.parent / "out")[1:]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("engine", ["reference-rollout", "stepwise-rollout"])
def test_async_run_bounds_staleness_of_each_prompt(
    recipe: Path, trained: list[tuple[int, list[int]]], engine: str
) -> None:
    rows = run(recipe, *ASYNC, f"rollout.engine={engine}")
    assert [step for step, _ in trained] == [1, 2, 3, 4]
    numbers = [number for _, prompts in trained for number in prompts]
    assert sorted(numbers) == list(range(4 * 6))  # nothing was drawn that no step is left for
    assert all(row["staleness_max"] <= 2 for row in rows)
    assert max(row["staleness_max"] for row in rows) > 0
    assert all(0 <= row["prompts_ahead"] <= 2 * 6 for row in rows)
    for row in rows:
        lags = [name for name in row if name.startswith("mismatch_max_lag")]
        assert row["mismatch_max"] == max(row[name] for name in lags)
        assert row.get("mismatch_max_lag0", 0.0) < 1e-5


def test_a_synchronous_run_has_no_lag(recipe: Path, trained: list[tuple[int, list[int]]]) -> None:
    rows = run(recipe)
    assert trained == [(step, list(range(6 * step - 6, 6 * step))) for step in (1, 2, 3, 4)]
    assert all(row["staleness_max"] == row["mixed_versions"] == row["prompts_ahead"] == 0 for row in rows)
    assert all({*NAMES, *(f"{name}_lag0" for name in NAMES)} <= row.keys() for row in rows)


@pytest.mark.nightly
def test_sync_methods_give_equal_runs(recipe: Path, tmp_path: Path) -> None:
    runs = [run(recipe, f"rollout.sync={sync}", "fresh=true") for sync in ("disk", "tensor", "distributed")]
    timeless = [[{name: row[name] for name in row if "_s" not in name} for row in rows] for rows in runs]
    assert timeless[0] == timeless[1] == timeless[2]
    assert not list((tmp_path / "out").glob("*.rendezvous"))


def test_unsupported_sync_method_is_refused_early(recipe: Path) -> None:
    lacking = replace(
        stepwise_rollout.SPEC, capabilities=stepwise_rollout.SPEC.capabilities - {Capability.SYNC_TENSOR}
    )
    with (
        register_engine(lacking, replace=True),
        pytest.raises(UnsupportedCapability, match="weight sync by 'tensor'"),
    ):
        run(recipe, "rollout.engine=stepwise-rollout", "rollout.sync=tensor")


def test_mismatch_is_reported_without_recomputed_logprobs(recipe: Path) -> None:
    with register_engine(support.SHIFTED):
        rows = run(
            recipe, "algorithm.args.recompute_logprobs=false", "steps=2", "rollout.engine=shifted-rollout"
        )
    for row in rows:
        assert row["mismatch_k1"] == pytest.approx(support.SHIFT, abs=1e-5)
        assert row["mismatch_max"] == pytest.approx(support.SHIFT, abs=1e-5)


def outstanding(output: Path) -> list[int]:
    checkpoint = RunCheckpoints(output / "checkpoints", 2).latest()
    assert checkpoint is not None
    entries = [entry["data"] for entry in checkpoint.state["rollouts"]["outstanding"]]
    assert all(entry.keys() == {"source", "row", "group"} for entry in entries)
    return [entry["group"] for entry in entries]


def check_history(trained: list[tuple[int, list[int]]], output: Path) -> None:
    """Check that by the last run of each step every prompt drawn is consumed or outstanding."""
    last = dict(trained)
    numbers = [number for step in sorted(last) for number in last[step]] + outstanding(output)
    assert sorted(last) == [1, 2, 3, 4]
    assert sorted(numbers) == list(range(len(numbers)))


@pytest.mark.parametrize("stop_at", [3, pytest.param(4, marks=pytest.mark.nightly)])
def test_an_interrupted_asynchronous_run_loses_no_prompt(
    recipe: Path, trained: list[tuple[int, list[int]]], monkeypatch: pytest.MonkeyPatch, stop_at: int
) -> None:
    publish = OnlineLearner.sync

    def interrupting(loop: OnlineLearner, version: int) -> None:
        publish(loop, version)
        if version == stop_at:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(OnlineLearner, "sync", interrupting)
        with pytest.raises(KeyboardInterrupt):
            run(recipe, *ASYNC)
    rows = run(recipe, *ASYNC)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all(row["staleness_max"] <= 2 for row in rows)
    check_history(trained, recipe.parent / "out")


@pytest.mark.nightly
def test_a_killed_asynchronous_run_goes_on(recipe: Path, tmp_path: Path) -> None:
    """``kill -9`` of the driver at three moments; each prompt's number is read off the files that it leaves."""
    log = tmp_path / "trained.jsonl"
    script = tmp_path / "run.py"
    script.write_text(
        "import json, sys\n"
        "from core_rl.cli import main\n"
        "from core_rl_trainer.run.rollouts import Rollouts\n"
        "inner = Rollouts.training_batch\n"
        "def recorded(self, step, batches):\n"
        "    batch = inner(self, step, batches)\n"
        f"    print(json.dumps([step, batch['group'].unique().tolist()]), file=open({str(log)!r}, 'a'))\n"
        "    return batch\n"
        "if __name__ == '__main__':\n"
        "    Rollouts.training_batch = recorded\n"
        "    main()\n"
    )
    command = [sys.executable, str(script), "train", str(recipe), *ASYNC]
    support.run_killed(command, recipe.parent / "out")
    trained = [(step, prompts) for step, prompts in map(json.loads, log.read_text().splitlines())]
    check_history(trained, recipe.parent / "out")


# ----------------------------------------------------------- interruptible generation


def test_an_answer_goes_on_with_new_weights(start: Path, tmp_path: Path) -> None:
    """Two tokens before the update and two after it; each has the version and the log-prob of its own weights."""
    from transformers import AutoModelForCausalLM

    new = AutoModelForCausalLM.from_pretrained(start / "model")
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.mul_(1.5)
    new.save_pretrained(tmp_path / "new")
    config = ReferenceRolloutConfig(model=ModelConfig(path=str(start / "model")), device="cpu")
    backend = StepwiseRollout()
    engine = InferenceEngine(stepwise_rollout.SPEC, config, backend)
    engine.initialize()
    try:
        backend.hold_at = 2
        sampling = SamplingParams(max_new_tokens=4, ignore_eos=True, seed=3)
        workflow = SingleTurnWorkflow(reward=lambda prompt, output, data: 0.0, sampling=sampling)
        engine.submit({"prompt_ids": [support.BOS, 4, 5]}, workflow)
        assert backend.held.wait(60)
        with interrupted(engine):
            meta = WeightUpdateMeta(method="disk", version=1, path=str(tmp_path / "new"))
            engine.update_weights(meta).result(60)
            backend.go.set()
        batch = engine.wait(1, timeout=60)
        assert batch["versions"].tolist() == [-1, -1, -1, 0, 0, 1, 1]
        after = engine.score(batch)
        engine.set_version(2)
        engine.update_weights(WeightUpdateMeta(method="disk", version=2, path=str(start / "model"))).result(
            60
        )
        before = engine.score(batch)
    finally:
        engine.destroy()
    expected = torch.cat([torch.zeros(3), before[3:5], after[5:]])
    torch.testing.assert_close(batch["logprobs"], expected, atol=1e-5, rtol=0)
    assert not torch.allclose(before, after, atol=1e-3)


# ------------------------------------------------------------- names in recipes


def test_groups_without_a_signal_are_replaced(recipe: Path, trained: list[tuple[int, list[int]]]) -> None:
    rows = run(
        recipe,
        "rollout.should_accept=core_rl_trainer.rewards.functions:rewards_differ",
        "rollout.group_size=2",
    )
    assert all(row["groups_without_signal"] == 0 for row in rows)
    assert rows[-1]["prompts_rejected"] > 0
    numbers = [number for _, prompts in trained for number in prompts]
    assert len(numbers) == len(set(numbers)) == 4 * 6
    assert numbers == sorted(numbers)


def test_the_filter_for_a_signal() -> None:
    for rewards, accepted in (([1.0, 1.0], False), ([0.0], False), ([0.0, 1.0], True)):
        batch = SequenceBatch.from_sequences(
            [[1]] * len(rewards), sequences={"rewards": torch.tensor(rewards)}
        )
        assert rewards_differ(batch) is accepted


def test_prompts_without_completion_room_are_named(
    recipe: Path, start: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": "1+" * n + "1=", "answer": 1} for n in (1, 12, 14, 1, 1, 1, 1, 1)]
    support.write_jsonl(tmp_path / "long.jsonl", rows)
    message = r"long.jsonl: line 3 has 31 tokens, longer than the 28 tokens .*; shorten"
    with pytest.raises(BatchError, match=message):
        run(recipe, f"data.train={tmp_path}/long.jsonl")
    run(recipe, f"data.train={tmp_path}/long.jsonl", "data.unusable=drop", "steps=2")
    assert "are left out" in caplog.text


ENVIRONMENT = '''
"""A tool that replies to every first answer, and an environment with rewards of its own."""

from core_rl_trainer.environments import Observation
from core_rl_trainer.environments import ToolEnvironment


def echo(tokenizer):
    def tool(answer, sample):
        sample.setdefault("calls", []).append(answer)
        return None if len(sample["calls"]) > 1 else "=" + str(sample["answer"])

    class Once(ToolEnvironment):
        async def reset(self, data):
            return await super().reset({**data})

    return Once(tokenizer, tool)


class Scored:
    def __init__(self, tokenizer):
        self.turns = 0

    async def reset(self, data):
        return data["prompt_ids"]

    async def step(self, output_ids):
        self.turns += 1
        return Observation(ids=(3,), reward=len(set(output_ids)) / 4, done=self.turns == 2)

    async def close(self):
        pass
'''


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "overrides"), [("echo", []), ("Scored", ["reward=null", *ASYNC])], ids=["tool", "own rewards"]
)
def test_a_recipe_may_name_an_environment(
    recipe: Path, tmp_path: Path, name: str, overrides: list[str]
) -> None:
    (tmp_path / "my_environment.py").write_text(ENVIRONMENT)
    rows = run(recipe, f"rollout.environment={tmp_path}/my_environment.py:{name}", "steps=2", *overrides)
    assert all(1 <= row["turns"] <= 2 for row in rows)
    assert all(row.get("mismatch_max_lag0", 0.0) < 1e-5 for row in rows)
    assert all(row["reward"] > 0 for row in rows)


def test_process_rewards_of_run_and_hanging_reward(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import time\n\n\ndef slow(answer, sample):\n"
        "    if sample['_number'] == 8:\n        time.sleep(600)\n    return len(set(answer)) / 4\n"
    )
    overrides = [
        f"reward={tmp_path}/slow.py:slow",
        "rollout.reward_processes=2",
        "rollout.reward_timeout_s=2",
    ]
    message = r"sample 8, completion \d: the reward function slow: gave no result in 2 s \(slow.py:6\)"
    with pytest.raises(RolloutError, match=message):
        run(recipe, *overrides)
    assert [row["step"] for row in support.curve(tmp_path / "out")] == [0, 1]
