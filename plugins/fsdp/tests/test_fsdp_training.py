"""The arithmetic recipes on ``fsdp`` and on ``reference``: the same seed gives the same curve."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import arithmetic_support as arithmetic
import fsdp_support as support
import pytest
import torch
from recipe_curves import Curve, curve_of

from core_rl.data.batch import SequenceBatch
from core_rl.data.micro_batch import MicroBatchSpec, shard
from core_rl.engine.train import TrainEngine
from core_rl.launch.group import EngineGroup
from core_rl_trainer.algorithms import PPOActorConfig, PPOActorInterface
from core_rl_trainer.algorithms.advantages import ReinforcePlusPlus
from core_rl_trainer.algorithms.off_policy import Truncated

OWN_RANK = ["critic.layout={dp: 1}", "placement={actor: [0, 1], critic: [2]}", "colocated=true"]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return arithmetic.make_start(tmp_path_factory.mktemp("start"), rows=32)


def curve(name: str, engine: str, start: Path, output: Path, *more: str) -> Curve:
    """The metrics of three steps of a recipe."""
    overrides = arithmetic.overrides_for(start, engine, "rollout.prompts_per_step=16", "steps=3", *more)
    return curve_of(arithmetic.recipe_of(name), overrides, output)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "more"),
    [("grpo", []), pytest.param("ppo", OWN_RANK, marks=pytest.mark.nightly)],
    ids=["grpo", "ppo with the critic on a rank of its own"],
)
def test_curve_matches_the_reference(name: str, more: list[str], start: Path, tmp_path: Path) -> None:
    """On two data-parallel ranks; the rest is rounding, which three steps of Adam amplify."""
    actual = curve(name, "fsdp", start, tmp_path / "fsdp", *more)
    expected = curve(name, "reference", start, tmp_path / "reference")
    assert len(actual) == 4
    assert all(row["grad_norm"] > 0 for row in actual[1:])
    for step, (local, second) in enumerate(zip(actual, expected, strict=True)):
        assert local == pytest.approx(second, rel=1e-3, abs=1e-4), f"step {step}"


@pytest.mark.nightly
def test_ppo_resumes_bit_for_bit_after_kills(start: Path, tmp_path: Path) -> None:
    """On two data-parallel ranks, and two for the critic."""
    arithmetic.check_kills_change_nothing(start, "fsdp", tmp_path)


# ------------------------------------------------------------- on each rank by itself


def rollout_batch() -> SequenceBatch:
    """Four groups of two answers, of different lengths."""
    batch = support.make_batch(0)
    pairs = batch.num_sequences // 2
    batch = batch.select(range(2 * pairs))
    generator = torch.Generator().manual_seed(3)
    logprobs = -torch.rand(batch.num_tokens, generator=generator)
    return batch.with_tokens(loss_mask=batch.loss_mask, logprobs=logprobs).with_sequences(
        rewards=torch.rand(2 * pairs, generator=generator), group=torch.arange(pairs).repeat_interleave(2)
    )


def train_on_part(engine: TrainEngine, actor: PPOActorInterface, part: SequenceBatch) -> dict[str, float]:
    return actor.train_step(engine, part, MicroBatchSpec(max_tokens=64))


def test_spmd_algorithm_agrees_with_driver() -> None:
    """Whitening, its moments, importance and mismatch belong to the global batch."""
    config = PPOActorConfig(
        advantage=ReinforcePlusPlus(), whiten_advantages=True, correction=Truncated(limit=1.5)
    )
    actor, batch = PPOActorInterface(config), rollout_batch()
    batch = replace(batch, unit=batch["group"])
    with EngineGroup("fsdp", support.fsdp_config(2), timeout_s=120) as group:
        proximal = actor.inference(group, batch, MicroBatchSpec(max_tokens=64))["logprobs"]
        batch = batch.with_tokens(prox_logprobs=proximal)
        parts = shard(batch, 2)
        expected = actor.train_step(group, batch, MicroBatchSpec(max_tokens=64))
        group.initialize()
        actual = group.run_each(train_on_part, [(actor, part) for part in parts])
    for local in actual:
        assert local == pytest.approx(expected, rel=1e-4, abs=1e-6)
