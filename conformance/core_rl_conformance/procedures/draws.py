"""Whether drawn tokens follow a distribution, by exact tests with a bound on false alarms.

Each token, and each set of the most likely tokens, is drawn a binomial number of times. The tail
probability of the observation is exact, so the bound holds for rare tokens and few draws, where a
chi-square statistic is only approximate; all tests of one run share it (Bonferroni).

Within an answer each token is drawn from a distribution of its own, which depends on those before it. What
is counted there is not binomial, and bets bound it as exactly: see `most_surprising_bet`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FALSE_ALARMS = 1e-9
"""The probability that a run of draws from the very distribution fails."""
Event = tuple[str, int, int, float]
"""In words; the number of times it came, the number of draws, and its probability in each of them."""
STAKES = (-2.0, -1.0, -0.5, 0.5, 1.0, 2.0)
"""Bets on fewer, and on more; of several sizes, because the best size depends on the mistake."""
WITHIN: dict[str, Callable[[Sequence[int], Tensor], Tensor]] = {
    "a token that the answer has already": lambda before, row: torch.tensor(
        sorted(set(before)), dtype=torch.long
    ),
    "the most likely token": lambda before, row: row.argmax()[None],
    "one of the 4 most likely tokens": lambda before, row: row.topk(4).indices,
    "one of the least likely third of tokens": lambda before, row: _least_likely(row),
    "the token before": lambda before, row: torch.tensor(before[-1:], dtype=torch.long),
}
"""Counted tokens within answers: its ids, after the tokens ``before``, where the log-probs are ``row [V]``."""


def _least_likely(row: Tensor) -> Tensor:
    """Ids of possible tokens outside of the most likely ones, which have two thirds of the probability."""
    order = row.argsort(descending=True)
    outside = (row[order].exp().cumsum(0) > 2 / 3) & row[order].isfinite()
    return order[outside]


@dataclass(frozen=True, kw_only=True)
class Surprise:
    """The number of times something was drawn, and its probability."""

    what: str
    count: int
    draws: int
    probability: float
    """Probability of the event in each draw."""
    tail: float
    """The probability of a count so far from the expectation, times the number of tests; at most 1."""

    def __str__(self) -> str:
        return (
            f"{self.what} came {self.count} times in {self.draws} draws; expected "
            f"{self.probability * self.draws:.1f}, with a probability below {max(self.tail, 1e-300):.0e}"
        )


def binomial_tail(count: int, draws: int, probability: float) -> float:
    """Twice the smaller of P(X <= count) and P(X >= count), at most 1; X is binomial."""
    below = math.fsum(_terms(range(count + 1), draws, probability))
    above = math.fsum(_terms(range(count, draws + 1), draws, probability))
    return min(1.0, 2 * min(below, above))


def _terms(counts: range, draws: int, probability: float) -> Iterator[float]:
    log_p = math.log(max(probability, 1e-300))
    log_q = math.log(max(1 - probability, 1e-300))
    total = math.lgamma(draws + 1)
    for k in counts:
        ways = total - math.lgamma(k + 1) - math.lgamma(draws - k + 1)
        yield math.exp(ways + k * log_p + (draws - k) * log_q)


def most_surprising(tokens: Sequence[int], logprobs: Tensor) -> Surprise:
    """The least probable thing about ``tokens``, drawn from ``logprobs [V]`` (float64)."""
    return least_probable([(label, n, len(tokens), p) for label, n, p in _events(tokens, logprobs)])


def least_probable(events: Sequence[Event]) -> Surprise:
    """The least probable of all ``events``."""
    tails = [binomial_tail(count, draws, probability) for _, count, draws, probability in events]
    tail, (label, count, draws, probability) = min(zip(tails, events, strict=True), key=lambda pair: pair[0])
    tail = min(1.0, len(events) * tail)
    return Surprise(what=label, count=count, draws=draws, probability=probability, tail=tail)


def _events(tokens: Sequence[int], logprobs: Tensor) -> Iterator[tuple[str, int, float]]:
    counts, probabilities = Counter(tokens), logprobs.exp()
    order = logprobs.argsort(descending=True).tolist()
    rank = {token: place for place, token in enumerate(order)}
    for token in order:
        yield f"token {token}", counts[token], float(probabilities[token])
    size = 2
    while size < len(order):
        likely = sum(count for token, count in counts.items() if rank[token] < size)
        yield f"one of the {size} most likely tokens", likely, float(probabilities[order[:size]].sum())
        size *= 2


def most_surprising_bet(
    answers: Sequence[Sequence[int]], logprobs: Sequence[Tensor], clear: Sequence[Tensor] | None = None
) -> Surprise:
    """The least probable thing about ``answers``, each drawn token by token from its ``logprobs [n, V]`` (float64).

    Only places that are ``clear [n]`` count, by default all.

    A bet of ``1 - p + p * exp(s)`` before each token and gets ``exp(s)`` for an event of probability ``p``, else
    1, plays a fair game, whatever came before. So the final capital exceeds ``1 / a`` with probability
    ``a`` at most (Ville's inequality).
    """
    counted = clear or [torch.ones(len(rows), dtype=torch.bool) for rows in logprobs]
    hits = {label: _hits(answers, logprobs, counted, label) for label in WITHIN}
    draws = sum(int(places.sum()) for places in counted)
    worst: Surprise | None = None
    for label, pairs in hits.items():
        won = max(
            math.fsum(stake * hit - math.log1p(p * math.expm1(stake)) for hit, p in pairs) for stake in STAKES
        )
        tail = min(1.0, len(STAKES) * len(WITHIN) * math.exp(-max(won, 0.0)))
        if worst is None or tail < worst.tail:
            count, mean = sum(hit for hit, _ in pairs), math.fsum(p for _, p in pairs) / max(draws, 1)
            worst = Surprise(what=label, count=count, draws=draws, probability=mean, tail=tail)
    assert worst is not None
    return worst


def _hits(
    answers: Sequence[Sequence[int]], logprobs: Sequence[Tensor], clear: Sequence[Tensor], label: str
) -> list[tuple[bool, float]]:
    """For each token at a clear place, whether it was that, and with which probability."""
    pairs = []
    for ids, rows, places in zip(answers, logprobs, clear, strict=True):
        for place in places.nonzero().flatten().tolist():
            token, row = ids[place], rows[place]
            members = WITHIN[label](ids[:place], row)
            pairs.append((bool((members == token).any()), min(1.0, float(row[members].exp().sum()))))
    return pairs
