"""Model interfaces: the registry, and what the steps of SFT and PPO do with an engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from algorithm_support import BigramEngine, drop_tokens, ragged_batch

from core_rl.algorithms import (
    ModelInterface,
    ModelInterfaceAbstraction,
    PPOActorConfig,
    PPOActorInterface,
    SFTConfig,
    SFTInterface,
    available_interfaces,
    interface,
    make_interface,
    register_interface,
)
from core_rl.algorithms.advantages import group_advantages, spread_to_tokens
from core_rl.data.batch import SequenceBatch
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.errors import BatchError, ConfigError

ONE = MicroBatchSpec(count=1)
LENGTHS = [6, 3, 5, 8]


class OtherSFT(SFTInterface):
    """A third party's interface."""


class NoConfig:
    """Not an interface."""


@pytest.fixture
def registered() -> Iterator[None]:
    """Names registered during a test are forgotten after it."""
    before = dict(interface._registered)
    yield
    interface._registered.clear()
    interface._registered.update(before)


def test_built_in_interfaces_are_found_by_name() -> None:
    made = make_interface(ModelInterfaceAbstraction("ppo_actor", {"kl_coef": 0.1, "kl_estimator": "k2"}))
    assert isinstance(made, PPOActorInterface)
    assert made.config == PPOActorConfig(kl_coef=0.1, kl_estimator="k2")
    assert isinstance(make_interface(ModelInterfaceAbstraction("sft")), SFTInterface)


def test_an_import_path_names_any_interface() -> None:
    made = make_interface(ModelInterfaceAbstraction(f"{__name__}:OtherSFT"))
    assert type(made).__name__ == "OtherSFT"


def test_a_registered_interface_is_found(registered: None) -> None:
    register_interface("other", OtherSFT)
    register_interface("other", OtherSFT)
    assert isinstance(make_interface(ModelInterfaceAbstraction("other")), OtherSFT)
    assert available_interfaces() == ["other", "ppo_actor", "sft"]


@pytest.mark.parametrize(
    ("name", "first", "cls"),
    [("other", OtherSFT, SFTInterface), ("sft", None, OtherSFT)],
    ids=["own", "core"],
)
def test_a_second_owner_of_a_name_is_refused(
    registered: None, name: str, first: type[ModelInterface[Any]] | None, cls: type[ModelInterface[Any]]
) -> None:
    if first is not None:
        register_interface(name, first)
    with pytest.raises(ConfigError, match=f"{name!r} belongs to .*choose another"):
        register_interface(name, cls)


@pytest.mark.parametrize(
    ("type_", "args", "message"),
    [
        ("ppo-actor", {}, "no interface 'ppo-actor'; did you mean 'ppo_actor'"),
        ("nothing_like_it", {}, "Known: ppo_actor, sft"),
        ("no_such_module:Class", {}, "cannot be loaded"),
        ("core_rl.algorithms.sft:Nothing", {}, "cannot be loaded"),
        (f"{__name__}:NoConfig", {}, "must be a subclass of ModelInterface"),
        ("ppo_actor", {"clip": 0.1}, "interface 'ppo_actor': unknown field 'clip'.*clip_low"),
        ("ppo_actor", {"kl_estimator": "k4"}, "'kl_estimator' = 'k4'"),
        ("sft", {"kl_coef": 1}, "unknown field 'kl_coef'"),
    ],
)
def test_a_bad_name_or_setting_is_named(type_: str, args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_interface(ModelInterfaceAbstraction(type_, args))


def test_an_interface_that_leaves_out_a_step_cannot_be_built() -> None:
    class Half(ModelInterface[SFTConfig]):
        config_class = SFTConfig

        def inference(self, engine: Any, batch: SequenceBatch, mb_spec: MicroBatchSpec) -> SequenceBatch:
            return batch

    with pytest.raises(TypeError, match="train_step"):
        Half(SFTConfig())  # type: ignore[abstract]


# ------------------------------------------------------------------------ steps


def test_sft_steps_lower_the_loss() -> None:
    engine, batch = BigramEngine(), ragged_batch(LENGTHS)
    sft = SFTInterface(SFTConfig())
    losses = [sft.train_step(engine, batch, ONE)["nll"] for _ in range(5)]
    assert losses == sorted(losses, reverse=True)
    scored = sft.inference(engine, batch, ONE)
    mean = -float(scored["logprobs"][batch.loss_mask].mean())
    assert mean < losses[-1]


def test_ppo_raises_the_log_probs_of_rewarded_sequences() -> None:
    engine, actor = BigramEngine(), PPOActorInterface(PPOActorConfig(recompute_logprobs=False))
    batch = ragged_batch(LENGTHS)
    batch = batch.with_tokens(logprobs=engine.forward(batch, ONE)["logprobs"]).with_sequences(
        rewards=torch.tensor([1.0, 0.0, 0.0, 1.0])
    )
    batch = drop_tokens(batch, "prox_logprobs", "ref_logprobs")
    actor.train_step(engine, batch, ONE)
    gain = engine.forward(batch, ONE)["logprobs"] - batch["logprobs"]
    per_sequence = [float(part.sum()) for part in gain.split(batch.lengths)]
    assert min(per_sequence[0], per_sequence[3]) > max(per_sequence[1], per_sequence[2])


def test_advantages_come_from_the_global_batch_and_travel_with_the_sequences() -> None:
    engine = BigramEngine()
    actor = PPOActorInterface(PPOActorConfig(recompute_logprobs=False, minibatches=2, epochs=3))
    batch = drop_tokens(ragged_batch(LENGTHS), "prox_logprobs", "advantages")
    metrics = actor.train_step(engine, batch, ONE)
    assert metrics["updates"] == len(engine.batches) == 6
    whole = spread_to_tokens(group_advantages(batch["rewards"], batch["group"]), batch)
    seen = SequenceBatch.concat(engine.batches[:2])
    assert sorted(seen["advantages"].tolist()) == sorted(whole.tolist())
    assert seen.num_sequences == batch.num_sequences


def test_metrics_of_several_updates_are_means_and_extremes() -> None:
    actor = PPOActorInterface(PPOActorConfig(recompute_logprobs=False, epochs=2))
    batch = drop_tokens(ragged_batch(LENGTHS), "prox_logprobs", "advantages")
    both = actor.train_step(BigramEngine(), batch, ONE)
    engine = BigramEngine()
    single = PPOActorInterface(PPOActorConfig(recompute_logprobs=False))
    first, second = (single.train_step(engine, batch, ONE) for _ in range(2))
    assert both["entropy"] == pytest.approx((first["entropy"] + second["entropy"]) / 2)
    assert both["ratio_max"] == max(first["ratio_max"], second["ratio_max"])
    assert both["ratio_min"] == min(first["ratio_min"], second["ratio_min"])
    assert both["mismatch_k1"] == first["mismatch_k1"] != second["mismatch_k1"]


def test_mismatch_covers_the_whole_batch_where_log_probs_were_recomputed() -> None:
    engine, actor = BigramEngine(), PPOActorInterface(PPOActorConfig(minibatches=4))
    batch = ragged_batch(LENGTHS)
    metrics = actor.train_step(engine, batch, ONE)
    difference = (batch["prox_logprobs"] - batch["logprobs"])[batch.loss_mask]
    assert metrics["mismatch_max"] == pytest.approx(float(difference.abs().max()))
    assert metrics["mismatch_k1"] == pytest.approx(-float(difference.mean()))


def test_inference_replaces_the_log_probs_at_the_temperature_of_the_rollouts() -> None:
    engine, batch = BigramEngine(), ragged_batch(LENGTHS)
    with torch.no_grad():
        engine.weights += torch.randn(engine.weights.shape, generator=torch.Generator().manual_seed(0))
    actor = PPOActorInterface(PPOActorConfig(temperature=0.5))
    scored = actor.inference(engine, batch, ONE)
    torch.testing.assert_close(scored["logprobs"], engine.run(batch, 0.5).detached()["logprobs"])
    assert not torch.equal(scored["logprobs"], batch["logprobs"])


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, {"prox_logprobs"}),
        ({"recompute_logprobs": False}, set()),
        ({"kl_coef": 0.1}, {"prox_logprobs", "ref_logprobs"}),
    ],
)
def test_the_actor_says_which_fields_it_wants(settings: dict[str, Any], wanted: set[str]) -> None:
    actor = PPOActorInterface(PPOActorConfig(**settings))
    assert actor.wanted_fields == wanted
    for name in wanted:
        with pytest.raises(BatchError, match=rf"needs the fields \['{name}'\]"):
            actor.train_step(BigramEngine(), drop_tokens(ragged_batch(LENGTHS), name), ONE)
