"""Exact tests of draws: they follow the binomial distribution, rarely alarm, and detect mistakes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core_rl_conformance.engine_under_test import EngineUnderTest
from core_rl_conformance.procedures.draws import (
    FALSE_ALARMS,
    binomial_tail,
    most_surprising,
    most_surprising_bet,
)
from core_rl_conformance.procedures.masks import RATE, verify_rate_and_ranks

DRAWS = 256


def logprobs(temperature: float = 1.0, size: int = 151) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.log_softmax(3.0 * torch.randn(size, generator=generator).double() / temperature, -1)


def draw(probabilities: torch.Tensor, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.multinomial(probabilities, DRAWS, replacement=True, generator=generator).tolist()


@given(draws=st.integers(1, 30), data=st.data(), probability=st.floats(0.0, 1.0))
def test_tails_match_binomial_distribution(draws: int, data: st.DataObject, probability: float) -> None:
    count = data.draw(st.integers(0, draws))
    terms = [
        math.comb(draws, k) * probability**k * (1 - probability) ** (draws - k) for k in range(draws + 1)
    ]
    expected = min(1.0, 2 * min(sum(terms[: count + 1]), sum(terms[count:])))
    assert binomial_tail(count, draws, probability) == pytest.approx(expected, rel=1e-6, abs=1e-12)


def test_draws_from_the_distribution_rarely_surprise() -> None:
    """The corrected tail is a bound: below 1 % it comes in at most some of a hundred runs."""
    log_p = logprobs()
    tails = [most_surprising(draw(log_p.exp(), seed), log_p).tail for seed in range(100)]
    assert min(tails) > FALSE_ALARMS
    assert sum(tail < 0.01 for tail in tails) <= 6


def cut(log_p: torch.Tensor, count: int) -> torch.Tensor:
    p = log_p.exp()
    return torch.where(p >= p.topk(count).values[-1], p, 0.0)


WRONG: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "greedy": lambda log_p: cut(log_p, 1),
    "top-k": lambda log_p: cut(log_p, 20),
    "another temperature": lambda log_p: (0.5 * log_p).exp(),
    "one token never comes": lambda log_p: log_p.exp().index_fill(0, log_p.argmax(), 0.0),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("seed", range(3))
def test_wrong_draws_are_detected(name: str, seed: int) -> None:
    log_p = logprobs(temperature=2.0)
    surprise = most_surprising(draw(WRONG[name](log_p), seed), log_p)
    assert surprise.tail < FALSE_ALARMS
    assert f"in {DRAWS} draws; expected" in str(surprise)


def test_impossible_token_is_most_surprising() -> None:
    log_p = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64).log()
    surprise = most_surprising([0, 1, 0, 1, 2], log_p)
    assert surprise.what == "token 2"
    assert surprise.tail < FALSE_ALARMS


def answers(seed: int, penalty: float) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Twenty answers of 24 tokens, drawn with a ``penalty`` on repetition, and the log-probs without it."""
    rows = torch.log_softmax(2.0 * logprobs(temperature=2.0, size=24 * 40).reshape(24, 40), -1)
    generator = torch.Generator().manual_seed(seed)
    responses = []
    for _ in range(20):
        ids: list[int] = []
        for row in rows:
            bent = row.index_add(
                0,
                torch.tensor(sorted(set(ids)), dtype=torch.long),
                torch.full((len(set(ids)),), -penalty).double(),
            )
            ids.append(int(torch.multinomial(bent.exp(), 1, generator=generator)))
        responses.append(ids)
    return responses, [rows] * len(responses)


@pytest.mark.nightly
def test_answers_rarely_surprise() -> None:
    tails = [most_surprising_bet(*answers(seed, 0.0)).tail for seed in range(30)]
    assert min(tails) > 1e-3


@pytest.mark.parametrize("seed", range(3))
def test_a_penalty_on_repetition_is_seen(seed: int) -> None:
    surprise = most_surprising_bet(*answers(seed, 3.0))
    assert surprise.what == "a token that the answer has already"
    assert surprise.tail < FALSE_ALARMS


class Judge:
    """Requirement of a check, without an engine."""

    def require(self, holds: bool, message: str) -> None:
        assert holds, message


def masks(seed: int, *layers: str) -> dict[str, torch.Tensor]:
    """Which of 80 inputs of each layer a rank keeps."""
    generator = torch.Generator().manual_seed(seed)
    return {layer: torch.rand(80, generator=generator) >= RATE for layer in layers}


def test_ranks_may_show_masks_of_different_layers() -> None:
    judge = cast("EngineUnderTest", Judge())
    verify_rate_and_ranks(judge, "an input", [masks(0, "q", "v", "up"), masks(1, "v", "up")])
    with pytest.raises(AssertionError, match="on data-parallel rank 1 where it is on rank 0"):
        verify_rate_and_ranks(judge, "an input", [masks(0, "q", "v", "up"), masks(0, "q", "v")])
    with pytest.raises(AssertionError, match="shows no layer that the one of rank 0 shows"):
        verify_rate_and_ranks(judge, "an input", [masks(0, "q"), masks(1, "v")])
