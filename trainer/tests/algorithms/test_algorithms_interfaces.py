"""Model interfaces: the registry, and the steps of SFT and PPO on an engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from algorithm_losses import plain_mean
from algorithm_support import VOCABULARY, BigramEngine, drop_tokens, ragged_batch
from hypothesis import given, settings
from hypothesis import strategies as st

from core_rl.backend.loss import LossSpec
from core_rl.backend.meta import SaveLoadMeta
from core_rl.config.base import parse_config
from core_rl.data.batch import SequenceBatch
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.data.outputs import ModelOutput, OutputName
from core_rl.errors import BatchError, ConfigError
from core_rl_trainer.algorithms import (
    ModelInterface,
    ModelInterfaceAbstraction,
    PPOActorConfig,
    PPOActorInterface,
    PPOCriticConfig,
    PPOCriticInterface,
    SFTConfig,
    SFTInterface,
    available_interfaces,
    interface,
    make_interface,
    register_interface,
)
from core_rl_trainer.algorithms.advantages import (
    RLOO,
    gae_advantages,
    grpo_advantages,
    rloo_advantages,
    spread_to_tokens,
    token_rewards,
    whiten,
)
from core_rl_trainer.algorithms.aggregation import Aggregation, FixedLength
from core_rl_trainer.algorithms.objectives import GSPO, Clipped

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
    assert {"other", "ppo_actor", "sft"} < set(available_interfaces())


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
    ("name", "args", "message"),
    [
        ("ppo-actor", {}, "there is no interface 'ppo-actor'; did you mean 'ppo_actor'"),
        ("nothing_like_it", {}, "Known: .*ppo_actor.*sft"),
        ("no_such_module:Class", {}, "there is no module 'no_such_module'"),
        ("core_rl_trainer.algorithms.sft:Nothing", {}, "has no attribute 'Nothing'"),
        (f"{__name__}:NoConfig", {}, "must be a subclass of ModelInterface"),
        ("ppo_actor", {"clip": 0.1}, "interface 'ppo_actor': unknown field 'clip' = 0.1; remove it"),
        ("grpo", {"beta": 0.04}, "'beta' = 0.04; its place here is kl_coef$"),
        ("dapo", {"epsilon": 0.2}, "'epsilon' = 0.2; its place here is loss.clip_low and loss.clip_high$"),
        ("dpo", {"loss_type": "ipo"}, "'loss_type' = 'ipo'; its place here is variant$"),
        ("ppo_actor", {"loss": {"clip_lo": 0.1}}, "'loss.clipped.clip_lo' = 0.1; did you mean 'clip_low'"),
        (
            "ppo_actor",
            {"loss": {"type": "cispo", "lam": 1}},
            "'loss.cispo.lam' = 1; its place here is advantage.lam$",
        ),
        ("ppo_actor", {"loss": {"type": "cispo", "gamut": 1}}, "unknown field 'loss.cispo.gamut'.*clip_high"),
        ("ppo_actor", {"loss": "gspoo"}, "no policy loss 'gspoo'; did you mean 'gspo'"),
        ("ppo_actor", {"loss": "no_module:fn"}, "policy loss 'no_module:fn': there is no module"),
        ("ppo_actor", {"loss": {"type": "os:getcwd", "settings": {"a": 1}}}, "takes no settings"),
        ("ppo_actor", {"advantage": "gea"}, "no advantage rule 'gea'; did you mean 'gae'"),
        (
            "ppo_actor",
            {"advantage": {"type": "grpo", "lam": 1}},
            "'advantage.grpo.lam' = 1; remove it. Known fields: ",
        ),
        ("ppo_actor", {"correction": "tis"}, "'correction'.*'tis'.*'token_truncated'"),
        ("ppo_actor", {"correction": {"type": "token_masked", "low": 3}}, "low = 3.0 must be below high"),
        ("ppo_actor", {"correction": "decoupled", "recompute_logprobs": False}, "needs recompute_logprobs"),
        ("ppo_actor", {"kl_target": 0.1}, "set kl_coef above 0"),
        ("ppo_actor", {"overlong": {"max_length": 3, "buffer": 4}}, "buffer = 4 is longer"),
        ("ppo_critic", {"clip_low": 0.1}, "unknown field 'clip_low'.*value_clip"),
        ("dpo", {"variant": "ipo", "label_smoothing": 0.1}, "label_smoothing belongs to variant 'dpo'"),
        ("ppo_actor", {"kl_estimator": "k4"}, "'kl_estimator' = 'k4'"),
        ("sft", {"kl_coef": 1}, "unknown field 'kl_coef'"),
    ],
)
def test_a_bad_name_or_setting_is_named(name: str, args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_interface(ModelInterfaceAbstraction(name, args))


def test_incomplete_interface_cannot_be_instantiated() -> None:
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
    batch = drop_tokens(batch, "prox_logprobs", "ref_logprobs", "advantages")
    actor.train_step(engine, batch, ONE)
    gain = engine.forward(batch, ONE)["logprobs"] - batch["logprobs"]
    per_sequence = [float(part.sum()) for part in gain.split(batch.lengths)]
    assert min(per_sequence[0], per_sequence[3]) > max(per_sequence[1], per_sequence[2])


def test_advantages_use_global_batch() -> None:
    engine = BigramEngine()
    actor = PPOActorInterface(PPOActorConfig(recompute_logprobs=False, minibatches=2, epochs=3))
    batch = drop_tokens(ragged_batch(LENGTHS), "prox_logprobs", "advantages")
    metrics = actor.train_step(engine, batch, ONE)
    assert metrics["updates"] == len(engine.batches) == 6
    expected = spread_to_tokens(grpo_advantages(batch["rewards"], batch["group"]), batch)
    seen = SequenceBatch.concat(engine.batches[:2])
    assert sorted(seen["advantages"].tolist()) == sorted(expected.tolist())
    assert seen.num_sequences == batch.num_sequences


def test_metrics_of_several_updates_are_means_and_extremes() -> None:
    actor = PPOActorInterface(PPOActorConfig(recompute_logprobs=False, epochs=2))
    batch = drop_tokens(ragged_batch(LENGTHS), "prox_logprobs", "advantages")
    both = actor.train_step(BigramEngine(), batch, ONE)
    engine = BigramEngine()
    single = PPOActorInterface(PPOActorConfig(recompute_logprobs=False))
    first, second = (single.train_step(engine, batch, ONE) for _ in range(2))
    assert both["entropy_estimate"] == pytest.approx(
        (first["entropy_estimate"] + second["entropy_estimate"]) / 2
    )
    assert both["ratio_max"] == max(first["ratio_max"], second["ratio_max"])
    assert both["ratio_min"] == min(first["ratio_min"], second["ratio_min"])


def test_inference_logprobs_use_rollout_temperature() -> None:
    engine, batch = BigramEngine(), ragged_batch(LENGTHS)
    with torch.no_grad():
        engine.weights += torch.randn(engine.weights.shape, generator=torch.Generator().manual_seed(0))
    actor = PPOActorInterface(PPOActorConfig(temperature=0.5))
    scored = actor.inference(engine, batch, ONE)
    torch.testing.assert_close(scored["logprobs"], engine.run(batch, 0.5).detached()["logprobs"])
    assert not torch.equal(scored["logprobs"], batch["logprobs"])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {"prox_logprobs"}),
        ({"recompute_logprobs": False}, set()),
        ({"kl_coef": 0.1}, {"prox_logprobs", "ref_logprobs"}),
    ],
)
def test_actor_lists_wanted_fields(settings: dict[str, Any], expected: set[str]) -> None:
    actor = PPOActorInterface(PPOActorConfig(**settings))
    assert actor.wanted_fields == expected
    for name in expected:
        with pytest.raises(BatchError, match=rf"needs the fields \['{name}'\]"):
            actor.train_step(BigramEngine(), drop_tokens(ragged_batch(LENGTHS), name, "advantages"), ONE)


# ---------------------------------------------------------------- the actor's own


def rollout_batch(seed: int = 0) -> SequenceBatch:
    return drop_tokens(ragged_batch([*LENGTHS, 4, 9], seed), "advantages")


@pytest.mark.parametrize(
    "name", sorted(set(available_interfaces()) - {"dpo", "ppo_critic", "reward_model", "sft"})
)
def test_each_named_algorithm_trains(name: str) -> None:
    """With its own settings, and with all that can be added to them."""
    for extra in ({}, {"kl_coef": 0.05, "correction": "token_truncated", "epochs": 2, "minibatches": 2}):
        actor, engine = make_interface(ModelInterfaceAbstraction(name, extra)), BigramEngine()
        batch = rollout_batch()
        values = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(2))
        batch = batch.with_tokens(values=values).with_sequences(
            bootstrap=torch.zeros(6), baseline_rewards=torch.zeros(6)
        )
        assert actor.wanted_fields <= {*batch.tokens, *batch.sequences}
        metrics = actor.train_step(engine, batch, ONE)
        assert metrics["updates"] == (4 if extra else 1)
        assert float(engine.weights.detach().abs().max()) > 0
        assert ("importance_ess" in metrics) == bool(extra)


def test_section_without_type_overrides_default_fields() -> None:
    made = make_interface(
        ModelInterfaceAbstraction("dr_grpo", {"loss": {"aggregation": {"fixed_length": 5}}})
    )
    assert made.config.loss == Clipped(aggregation=FixedLength(fixed_length=5))
    made = make_interface(ModelInterfaceAbstraction("gspo", {"loss": {"clip_high": 0.1}}))
    assert made.config.loss == GSPO(clip_high=0.1)


def test_kl_in_reward_changes_only_advantages() -> None:
    config = PPOActorConfig(
        advantage=RLOO(), kl_coef=0.3, kl_in="reward", kl_estimator="k1", recompute_logprobs=False
    )
    actor, batch = PPOActorInterface(config), drop_tokens(rollout_batch(), "prox_logprobs")
    advantages = actor.prepare(batch)["advantages"]
    kl = torch.where(batch.loss_mask, batch["logprobs"] - batch["ref_logprobs"], 0.0)
    penalties = torch.stack([part.sum() for part in kl.split(batch.lengths)])
    expected = rloo_advantages(batch["rewards"] - 0.3 * penalties, batch["group"])
    torch.testing.assert_close(advantages, spread_to_tokens(expected, batch), rtol=1e-5, atol=1e-5)
    assert actor.loss().kl_coef == 0


def test_gae_returns_use_unwhitened_advantages() -> None:
    actor = make_interface(
        ModelInterfaceAbstraction("ppo", {"advantage": {"type": "gae", "gamma": 0.9, "lam": 0.8}})
    )
    assert isinstance(actor, PPOActorInterface)
    batch = rollout_batch()
    values = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(2))
    batch = batch.with_tokens(values=values).with_sequences(bootstrap=torch.ones(6))
    prepared = actor.prepare(batch)
    plain = gae_advantages(token_rewards(batch["rewards"], batch), values, batch, gamma=0.9, lam=0.8)
    mask = batch.loss_mask
    torch.testing.assert_close(prepared["returns"], torch.where(mask, plain + values, 0.0))
    torch.testing.assert_close(prepared["advantages"], whiten(plain, mask))


def test_truncated_answers_go_on_with_the_critics_value() -> None:
    batch = rollout_batch()
    values = torch.zeros(batch.num_tokens)
    batch = batch.with_tokens(values=values).with_sequences(bootstrap=torch.full((6,), 2.0))
    batch = replace(batch, meta={"stop_reason": ["stop", "length", "stop", "stop", "stop", "stop"]})
    settings = {
        "advantage": {"type": "gae", "lam": 1.0, "bootstrap_truncated": True},
        "whiten_advantages": False,
    }
    actor = make_interface(ModelInterfaceAbstraction("ppo", settings))
    assert isinstance(actor, PPOActorInterface)
    returns = actor.prepare(batch)["returns"].split(batch.lengths)
    rewards = batch["rewards"].tolist()
    assert float(returns[1][-1]) == pytest.approx(rewards[1] + 2)
    assert float(returns[0][-1]) == pytest.approx(rewards[0])


def test_updates_end_above_max_kl() -> None:
    def updates(max_kl: float | None) -> dict[str, float]:
        actor = PPOActorInterface(PPOActorConfig(recompute_logprobs=False, epochs=5, max_kl=max_kl))
        engine = BigramEngine(lr=2.0)
        batch = drop_tokens(rollout_batch(), "prox_logprobs")
        batch = batch.with_tokens(logprobs=engine.forward(batch, ONE)["logprobs"])
        return actor.train_step(engine, batch, ONE)

    assert updates(None)["updates"] == 5
    assert updates(1e-6)["updates"] == 2  # the second sees the result of the first


@pytest.mark.parametrize(
    ("target", "factor"), [(None, 0), (1e-3, 0.2), (0.4, 0.2), (5 / 11, 0.1), (5.0, -0.2)]
)
def test_kl_coefficient_moves_towards_its_target(target: float | None, factor: float) -> None:
    config = PPOActorConfig(kl_coef=0.1, kl_target=target, kl_horizon=100)
    actor, batch = PPOActorInterface(config), rollout_batch()
    batch = batch.with_tokens(ref_logprobs=batch["prox_logprobs"] - 0.5)
    metrics = actor.train_step(BigramEngine(), batch, ONE)
    assert metrics["kl_coef"] == 0.1
    assert metrics["kl_before"] == pytest.approx(0.5)
    assert actor.state_dict() == {"coef": pytest.approx(0.1 * (1 + factor * 6 / 100))}
    restored = PPOActorInterface(config)
    restored.load_state_dict(actor.state_dict())
    assert restored.loss().kl_coef == actor.loss().kl_coef


def test_groups_without_signal_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    actor, engine = PPOActorInterface(PPOActorConfig(drop_equal_groups=True)), BigramEngine()
    batch = rollout_batch().with_sequences(rewards=torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 0.0]))
    actor.train_step(engine, batch, ONE)
    assert engine.batches[0]["group"].tolist() == [1, 1]
    engine.batches.clear()
    metrics = actor.train_step(engine, batch.with_sequences(rewards=torch.ones(6)), ONE)
    assert metrics == {"updates": 0.0, "update_successful": 0.0}
    assert not engine.batches
    assert "nothing to train" in caplog.text


@pytest.mark.parametrize("whitened", [False, True])
def test_truncated_completions_are_masked(whitened: bool) -> None:
    """Their rewards count in the baseline, and no metric of the loss counts their tokens."""
    batch, truncated = rollout_batch(), [1, 4, 5]
    reasons = ["length" if number in truncated else "stop" for number in range(6)]
    batch = replace(batch, meta={**batch.meta, "stop_reason": reasons})
    left = [number for number in range(6) if number not in truncated]
    actor = PPOActorInterface(PPOActorConfig(mask_truncated_completions=True, whiten_advantages=whitened))
    prepared, engine = actor.prepare(batch), BigramEngine()
    expected = PPOActorInterface(PPOActorConfig()).prepare(batch).select(left)
    if whitened:
        mask = expected.loss_mask
        expected = expected.with_tokens(advantages=whiten(expected["advantages"], mask))
    torch.testing.assert_close(prepared["advantages"], expected["advantages"])
    actor.train_step(engine, batch, ONE)
    assert engine.batches[0].num_sequences == len(left)
    all_truncated = replace(batch, meta={**batch.meta, "stop_reason": ["length"] * 6})
    assert actor.train_step(engine, all_truncated, ONE)["updates"] == 0
    with pytest.raises(BatchError, match="mask_truncated_completions needs the meta field 'stop_reason'"):
        actor.prepare(rollout_batch())


def test_equal_rewards_train_nothing_but_break_nothing() -> None:
    actor, engine = PPOActorInterface(PPOActorConfig(recompute_logprobs=False)), BigramEngine()
    batch = drop_tokens(rollout_batch(), "prox_logprobs").with_sequences(rewards=torch.ones(6))
    actor.train_step(engine, batch, ONE)
    assert float(engine.weights.detach().abs().max()) < 1e-6


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_step_with_nonfinite_reward_raises(bad: float) -> None:
    batch = rollout_batch()
    rewards = batch["rewards"].clone()
    rewards[3] = bad
    for name in ("grpo", "reinforce_plus_plus", "rloo"):
        actor = make_interface(ModelInterfaceAbstraction(name))
        with pytest.raises(BatchError, match="the reward of sequence 3 is"):
            actor.train_step(BigramEngine(), batch.with_sequences(rewards=rewards), ONE)


def position_advantages(batch: SequenceBatch) -> torch.Tensor:
    """A third party's rule."""
    return batch["token_rewards"] + batch.position_ids


def wrong_shape(batch: SequenceBatch) -> torch.Tensor:
    return batch["rewards"]


def test_a_custom_advantage_rule_is_used() -> None:
    actor = PPOActorInterface(parse_config(PPOActorConfig, {"advantage": f"{__name__}:position_advantages"}))
    batch = rollout_batch()
    expected = token_rewards(batch["rewards"], batch) + batch.position_ids
    torch.testing.assert_close(actor.prepare(batch)["advantages"], expected)
    wrong = PPOActorInterface(parse_config(PPOActorConfig, {"advantage": f"{__name__}:wrong_shape"}))
    with pytest.raises(BatchError, match="return one for each token"):
        wrong.prepare(batch)


# ------------------------------------------------------------------------- critic


@dataclass
class TableCritic:
    """A `TrainEngineLike` in float64: the value of a state is a parameter of the token before. Plain SGD."""

    lr: float = 0.5
    table: torch.Tensor = field(default_factory=lambda: torch.zeros(VOCABULARY, dtype=torch.float64))

    def __post_init__(self) -> None:
        self.table.requires_grad_(True)

    def run(self, batch: SequenceBatch) -> ModelOutput:
        last = batch.input_ids[batch.cu_seqlens[1:].long() - 1]
        return ModelOutput(values=self.table[batch.input_ids.roll(1)], bootstrap=self.table[last])

    def train_batch(self, batch: SequenceBatch, loss: LossSpec, mb_spec: MicroBatchSpec) -> dict[str, float]:
        total, metrics = loss.total(self.run(batch).masked(batch.loss_mask), batch)
        (gradient,) = torch.autograd.grad(total / loss.weight(batch), self.table)
        with torch.no_grad():
            self.table -= self.lr * gradient
        return {name: metric.result() for name, metric in metrics.items()}

    def forward(
        self,
        batch: SequenceBatch,
        mb_spec: MicroBatchSpec,
        outputs: tuple[OutputName, ...] = ("values",),
        temperature: float = 1.0,
    ) -> ModelOutput:
        return self.run(batch).detached()

    def save(self, meta: SaveLoadMeta) -> None:
        raise NotImplementedError


def test_the_critic_learns_the_returns() -> None:
    engine, critic = TableCritic(), PPOCriticInterface(PPOCriticConfig(value_clip=None, epochs=4))
    actor = make_interface(ModelInterfaceAbstraction("ppo"))
    assert isinstance(actor, PPOActorInterface)
    losses, explained = [], []
    for _ in range(6):
        batch = rollout_batch().with_sequences(rewards=torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 0.0]))
        prepared = actor.prepare(critic.inference(engine, batch, ONE))
        metrics = critic.train_step(engine, prepared, ONE)
        losses.append(metrics["value_loss"])
        explained.append(metrics["explained_variance"])
    assert losses[-1] < losses[0]
    assert explained[0] == 0.0  # with values of 0, the returns keep all of their variance
    assert explained[-1] > 0.1
    with pytest.raises(BatchError, match=r"PPO critic needs the fields \['returns', 'values'\]"):
        critic.train_step(engine, rollout_batch(), ONE)


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(2, 9), min_size=1, max_size=6),
    seed=st.integers(0, 99),
    clip=st.sampled_from([None, 0.1, 0.5]),
    how=st.sampled_from(["token_mean", "sequence_mean"]),
)
def test_the_value_loss_is_the_clipped_squared_error(
    lengths: list[int], seed: int, clip: float | None, how: Aggregation
) -> None:
    batch = ragged_batch(lengths, seed)
    batch = batch.with_tokens(values=batch["logprobs"], returns=batch["ref_logprobs"])
    values = batch["prox_logprobs"].clone().requires_grad_(True)
    loss = PPOCriticConfig(value_clip=clip, aggregation=how)
    total, _ = loss(ModelOutput(values=values), batch)
    expected = []
    for new, old, goal in zip(
        values.tolist(), batch["values"].tolist(), batch["returns"].tolist(), strict=True
    ):
        clamped = new if clip is None else min(max(new, old - clip), old + clip)
        expected.append(0.5 * max((new - goal) ** 2, (clamped - goal) ** 2))
    actual = float(total.detach()) / loss.spec().weight(batch)
    assert actual == pytest.approx(plain_mean(expected, batch, how), rel=1e-11)
