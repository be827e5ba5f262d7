"""Whether drawn tokens follow a distribution, by exact tests with a bound on false alarms.

Each token, and each set of the most likely tokens, is drawn a binomial number of times. The tail
probability of what was observed is exact, so the bound holds for rare tokens and few draws, where a
chi-square statistic is only approximate; all tests of one run share it (Bonferroni).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

__all__ = ["FALSE_ALARMS", "Surprise", "binomial_tail", "most_surprising"]

FALSE_ALARMS = 1e-9
"""The probability that a run of draws from the very distribution fails."""


@dataclass(frozen=True, kw_only=True)
class Surprise:
    """How often something was drawn, and how probable that is."""

    what: str
    count: int
    draws: int
    probability: float
    """Of the thing itself, in each draw."""
    tail: float
    """The probability of a count so far from what is expected, times the number of tests; at most 1."""

    def __str__(self) -> str:
        return (
            f"{self.what} came {self.count} times in {self.draws} draws; expected "
            f"{self.probability * self.draws:.1f}, with a probability below {max(self.tail, 1e-300):.0e}"
        )


def binomial_tail(count: int, draws: int, probability: float) -> float:
    """Twice the smaller one of P(X <= count) and P(X >= count), at most 1; X is binomial."""
    below = math.fsum(_terms(range(count + 1), draws, probability))
    above = math.fsum(_terms(range(count, draws + 1), draws, probability))
    return min(1.0, 2 * min(below, above))


def _terms(counts: range, draws: int, probability: float) -> Iterator[float]:
    log_p = math.log(max(probability, 1e-300))
    log_q = math.log(max(1 - probability, 1e-300))
    whole = math.lgamma(draws + 1)
    for k in counts:
        ways = whole - math.lgamma(k + 1) - math.lgamma(draws - k + 1)
        yield math.exp(ways + k * log_p + (draws - k) * log_q)


def most_surprising(tokens: Sequence[int], logprobs: Tensor) -> Surprise:
    """The least probable thing about ``tokens``, drawn from ``logprobs [V]`` (float64)."""
    found = list(_events(tokens, logprobs))
    tails = [binomial_tail(count, len(tokens), p) for _, count, p in found]
    least = min(range(len(found)), key=lambda index: tails[index])
    what, count, probability = found[least]
    return Surprise(
        what=what,
        count=count,
        draws=len(tokens),
        probability=probability,
        tail=min(1.0, len(found) * tails[least]),
    )


def _events(tokens: Sequence[int], logprobs: Tensor) -> Iterator[tuple[str, int, float]]:
    """What is counted, how often it came, and its probability."""
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
