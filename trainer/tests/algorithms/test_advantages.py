"""Advantages, returns and shaped rewards against plain float64 code, one sequence and token at a time."""

from __future__ import annotations

import math
import statistics
import threading
from collections.abc import Callable, Sequence

import pytest
import torch
from algorithm_support import ragged_batch, trained_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from core_rl.distributed.comm import Comm
from core_rl.errors import BatchError
from core_rl_trainer.algorithms.advantages import (
    discounted_sums,
    dr_grpo_advantages,
    gae_advantages,
    groups_with_signal,
    grpo_advantages,
    overlong_penalty,
    remax_advantages,
    returns_to_go,
    rloo_advantages,
    spread_to_tokens,
    token_rewards,
    whiten,
)

lengths_strategy = st.lists(st.integers(1, 9), min_size=1, max_size=7)
LENGTHS = [5, 2, 9, 3, 1, 7]


# ------------------------------------------------------------- whole sequences


def plain_grpo(reward: float, peers: Sequence[float]) -> float:
    spread = statistics.stdev(peers) if len(peers) > 1 else 0.0
    return (reward - statistics.fmean(peers)) / (spread + 1e-6)


def plain_dr_grpo(reward: float, peers: Sequence[float]) -> float:
    return reward - statistics.fmean(peers)


def plain_rloo(reward: float, peers: Sequence[float]) -> float:
    rest = list(peers)
    rest.remove(reward)
    return reward - statistics.fmean(rest) if rest else 0.0


@pytest.mark.parametrize(
    ("rule", "plain"),
    [(grpo_advantages, plain_grpo), (dr_grpo_advantages, plain_dr_grpo), (rloo_advantages, plain_rloo)],
    ids=["grpo", "dr_grpo", "rloo"],
)
@settings(max_examples=50)
@given(rewards=st.lists(st.floats(-5, 5, width=32), min_size=1, max_size=12), seed=st.integers(0, 99))
def test_group_rules_compare_each_reward_with_its_group(
    rule: Callable[[Tensor, Tensor], Tensor],
    plain: Callable[[float, Sequence[float]], float],
    rewards: list[float],
    seed: int,
) -> None:
    group = torch.randint(0, 4, (len(rewards),), generator=torch.Generator().manual_seed(seed))
    advantages = rule(torch.tensor(rewards), group)
    for index, reward in enumerate(rewards):
        peers = [r for r, g in zip(rewards, group.tolist(), strict=True) if g == group[index]]
        assert float(advantages[index]) == pytest.approx(plain(reward, peers), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("rule", [grpo_advantages, dr_grpo_advantages, rloo_advantages])
def test_equal_rewards_and_lone_sequences_have_no_advantage(rule: Callable[[Tensor, Tensor], Tensor]) -> None:
    advantages = rule(torch.tensor([0.1, 0.1, 0.1, 7.0]), torch.tensor([3, 3, 3, 8]))
    assert advantages.abs().max() < 1e-6


def test_remax_compares_with_the_greedy_answer() -> None:
    advantages = remax_advantages(torch.tensor([1.0, 0.0, 0.5]), torch.tensor([0.5, 0.5, 0.5]))
    assert advantages.tolist() == [0.5, -0.5, 0.0]


@pytest.mark.parametrize(
    ("rewards", "group", "message"),
    [
        ([1.0, float("nan")], [0, 0], "sequence 1 is nan"),
        ([1.0, float("inf"), 0.0], [0, 0, 0], "sequence 1 is inf"),
        ([1.0, 2.0], [0], "must both be"),
    ],
)
@pytest.mark.parametrize("rule", [grpo_advantages, dr_grpo_advantages, rloo_advantages, remax_advantages])
def test_bad_rewards_are_named(
    rule: Callable[[Tensor, Tensor], Tensor], rewards: list[float], group: list[int], message: str
) -> None:
    with pytest.raises(BatchError, match=message):
        rule(torch.tensor(rewards), torch.tensor(group))


def test_sequence_values_spread_to_their_tokens() -> None:
    batch = ragged_batch([2, 1, 3])
    assert spread_to_tokens(torch.tensor([5.0, 6.0, 7.0]), batch).tolist() == [5, 5, 6, 7, 7, 7]


# ---------------------------------------------------------------------- tokens


@settings(max_examples=60)
@given(
    counts=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    decay=st.floats(0, 1),
    seed=st.integers(0, 99),
)
def test_discounted_sums_are_the_recurrence(counts: list[int], decay: float, seed: int) -> None:
    values = torch.randn(sum(counts), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    owner = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    sums = discounted_sums(values, owner, decay).tolist()
    after = 0.0
    for t in reversed(range(len(values))):
        last = t + 1 == len(values) or owner[t + 1] != owner[t]
        after = float(values[t]) + (0.0 if last else decay * after)
        assert sums[t] == pytest.approx(after, rel=1e-12, abs=1e-12)


@settings(max_examples=60)
@given(
    lengths=lengths_strategy,
    gamma=st.floats(0, 1),
    lam=st.floats(0, 1),
    bootstrap=st.booleans(),
    seed=st.integers(0, 99),
)
def test_gae_is_the_recurrence_over_trained_tokens(
    lengths: list[int], gamma: float, lam: float, bootstrap: bool, seed: int
) -> None:
    """Masks with holes: what stands between two trained tokens is part of the environment."""
    generator = torch.Generator().manual_seed(seed)
    batch = ragged_batch(lengths, seed)
    total = batch.num_tokens
    batch = batch.with_tokens(loss_mask=torch.rand(total, generator=generator) < 0.6)
    rewards = torch.randn(total, generator=generator, dtype=torch.float64)
    values = torch.randn(total, generator=generator, dtype=torch.float64)
    last = torch.randn(len(lengths), generator=generator, dtype=torch.float64)
    hidden = ~batch.loss_mask
    actual = gae_advantages(
        rewards.masked_fill(hidden, math.nan),
        values.masked_fill(hidden, math.nan),
        batch,
        gamma=gamma,
        lam=lam,
        last_values=last if bootstrap else None,
    )
    for b, row in enumerate(trained_rows(batch)):
        following, advantage = (float(last[b]) if bootstrap else 0.0), 0.0
        for t in reversed(row):
            delta = float(rewards[t]) + gamma * following - float(values[t])
            advantage = delta + gamma * lam * advantage
            following = float(values[t])
            assert float(actual[t]) == pytest.approx(advantage, rel=1e-11, abs=1e-11)
    assert bool((actual[hidden] == 0).all())


def test_gae_without_discount_is_return_minus_value() -> None:
    batch = ragged_batch(LENGTHS)
    earned = token_rewards(batch["rewards"], batch).double()
    values = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    actual = gae_advantages(earned, values, batch)
    expected = torch.where(batch.loss_mask, returns_to_go(earned, batch) - values, 0.0)
    torch.testing.assert_close(actual, expected)


@settings(max_examples=40)
@given(lengths=lengths_strategy, prompt=st.integers(0, 4), seed=st.integers(0, 99))
def test_token_rewards_add_penalties_and_final_reward(lengths: list[int], prompt: int, seed: int) -> None:
    batch = ragged_batch(lengths, seed, prompt)
    penalties = batch["advantages"].masked_fill(~batch.loss_mask, math.nan)
    actual = token_rewards(batch["rewards"], batch, penalties)
    expected = [0.0] * batch.num_tokens
    for b, row in enumerate(trained_rows(batch)):
        for t in row:
            expected[t] = -float(penalties[t]) + (float(batch["rewards"][b]) if t == row[-1] else 0.0)
    assert actual.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert float(token_rewards(batch["rewards"], batch).sum()) == pytest.approx(
        sum(float(r) for r, row in zip(batch["rewards"], trained_rows(batch), strict=True) if row), abs=1e-5
    )


def test_the_overlong_penalty_falls_inside_the_buffer() -> None:
    batch = ragged_batch([5, 7, 8, 9, 11, 13])  # one token less is trained
    actual = overlong_penalty(batch, max_length=10, buffer=4)
    assert actual.tolist() == pytest.approx([0, 0, -0.25, -0.5, -1, -1])
    with pytest.raises(BatchError, match="buffer = 11"):
        overlong_penalty(batch, max_length=10, buffer=11)


def test_groups_with_signal_have_differing_rewards() -> None:
    rewards, group = torch.tensor([1.0, 1.0, 0.0, 1.0, 2.0]), torch.tensor([7, 7, 3, 3, 9])
    assert groups_with_signal(rewards, group).tolist() == [False, False, True, True, False]
    assert groups_with_signal(rewards[:0], group[:0]).tolist() == []


# ------------------------------------------------------------------- whitening


@settings(max_examples=40)
@given(lengths=st.lists(st.integers(2, 9), min_size=1, max_size=7), seed=st.integers(0, 99))
def test_whitened_values_have_mean_0_and_variance_1(lengths: list[int], seed: int) -> None:
    batch = ragged_batch(lengths, seed)
    mask = batch.loss_mask
    white = whiten(batch["advantages"].masked_fill(~mask, math.nan), mask)
    trained = batch["advantages"][mask].tolist()
    spread = statistics.variance(trained) if len(trained) > 1 else 0.0
    expected = [(value - statistics.fmean(trained)) / math.sqrt(spread + 1e-8) for value in trained]
    assert white[mask].tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert bool((white[~mask] == 0).all())


class ThreadComm(Comm):
    """Ranks that are threads of this process: sums meet at a barrier."""

    def __init__(self, size: int) -> None:
        super().__init__()
        object.__setattr__(self, "meeting", threading.Barrier(size))
        object.__setattr__(self, "entries", {})

    def sum(self, values: list[float]) -> list[float]:
        entries, meeting = self.__dict__["entries"], self.__dict__["meeting"]
        entries[threading.get_ident()] = values
        meeting.wait(10)
        total = [math.fsum(column) for column in zip(*entries.values(), strict=True)]
        meeting.wait(10)
        return total


def test_whitening_takes_its_moments_over_all_ranks() -> None:
    batch = ragged_batch(LENGTHS)
    parts = batch.split([[0, 3], [1, 2, 4, 5]])
    world = ThreadComm(2)
    by_rank: dict[int, Tensor] = {}

    def rank(number: int) -> None:
        by_rank[number] = whiten(parts[number]["advantages"], parts[number].loss_mask, world)

    threads = [threading.Thread(target=rank, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = whiten(batch["advantages"], batch.loss_mask)
    torch.testing.assert_close(by_rank[0], expected[batch.token_index([0, 3])])
    torch.testing.assert_close(by_rank[1], expected[batch.token_index([1, 2, 4, 5])])
