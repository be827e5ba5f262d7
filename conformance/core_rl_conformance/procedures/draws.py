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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

import torch
from torch import Tensor

from core_rl.data.requests import LLMResponse, SamplingParams
from core_rl_conformance.inputs.losses import wrong_temperatures

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


def left_by_cut(rows: Tensor, sampling: SamplingParams, margin: float) -> Tensor:
    """Log-probs ``rows [n, V]`` with -inf at the tokens that the cut drops; ``margin`` keeps tokens near the cut.

    The order is top-k, top-p of what top-k has left, and min-p. Greedy decoding leaves the most likely token.
    """
    ordered = rows.sort(descending=True).values
    keep = torch.ones_like(rows, dtype=torch.bool)
    top_k = 1 if sampling.greedy else sampling.top_k
    if top_k is not None:
        ordered = ordered[:, :top_k]
        keep &= rows >= ordered[:, -1:] - margin
    if sampling.greedy:
        return rows.masked_fill(~keep, -torch.inf)
    if sampling.top_p < 1:
        above = ordered[:, None, :] > rows[:, :, None] + margin
        before = (above * ordered.exp()[:, None, :]).sum(-1) / ordered.exp().sum(-1, keepdim=True)
        keep &= before < sampling.top_p + margin
    if sampling.min_p > 0:
        keep &= rows >= ordered[:, :1] + math.log(sampling.min_p) - margin
    return rows.masked_fill(~keep, -torch.inf)


def clear_of_cut(rows: Tensor, sampling: SamplingParams, margin: float) -> Tensor:
    """Bool ``[n]``: the places at which changes of ``rows [n, V]`` by ``margin`` leave the same tokens."""
    narrow = replace(
        sampling,
        top_p=sampling.top_p if sampling.top_p == 1 else max(sampling.top_p - margin, 1e-9),
        min_p=min(sampling.min_p * math.exp(margin), 0.999),
    )
    wide = left_by_cut(rows, sampling, margin).isfinite()
    return (wide == left_by_cut(rows, narrow, 0.0).isfinite()).all(-1)


CUTS = ("top_k", "top_p", "min_p")
CHANGES = ("presence_penalty", "repetition_penalty", "logit_bias")
"""Options that change logits, in their order."""
Count = Callable[[tuple[int, ...], tuple[int, ...]], Sequence[int]]
"""The tokens that penalties count, of a prompt and of the response so far."""
COUNTED: Mapping[str, Count] = {
    "the prompt's tokens as well": lambda prompt, ids: sorted({*prompt, *ids}),
    "the prompt's tokens alone": lambda prompt, ids: sorted(set(prompt)),
    "the prompt's last token as well": lambda prompt, ids: sorted({prompt[-1], *ids}),
    "a token each time": lambda prompt, ids: ids,
    "all tokens but the last": lambda prompt, ids: sorted(set(ids[:-1])),
}


def without(sampling: SamplingParams, *names: str) -> SamplingParams:
    """``sampling`` with the defaults of the options ``names``."""
    return replace(sampling, **{name: getattr(SamplingParams, name) for name in names})


@dataclass(frozen=True, kw_only=True)
class DrawnAnswers:
    """Answers to requests with ``sampling``, and the logits ``[n, V]`` from which the ``n`` tokens of each came."""

    sampling: SamplingParams
    responses: Sequence[LLMResponse]
    logits: Sequence[Tensor]
    changes: Sequence[Mapping[str, Any]] = ()
    """Fields with which other requests change logits."""

    def at(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """The values ``[n]`` of each ``rows [n, V]`` at the tokens of an answer."""
        pairs = zip(self.responses, rows, strict=True)
        return [row.gather(1, torch.tensor(answer.output_ids)[:, None]).squeeze(1) for answer, row in pairs]

    def logprobs(
        self,
        sampling: SamplingParams | None = None,
        order: Sequence[str] = CHANGES,
        count: Count = lambda prompt, ids: sorted(set(ids)),
    ) -> list[Tensor]:
        """Log-probs ``[n, V]`` of the changed logits; the arguments make mistakes."""
        options = sampling or self.sampling
        parts = []
        for response, rows in zip(self.responses, self.logits, strict=True):
            ids = response.output_ids
            counted = [count(response.input_ids, ids[:place]) for place in range(len(ids))]
            changed = [_changed(*pair, options, order) for pair in zip(rows, counted, strict=True)]
            parts.append((torch.stack(changed) / options.logprob_temperature).log_softmax(-1))
        return parts

    def mistakes(self) -> Iterator[tuple[str, list[Tensor]]]:
        """Sentences about mistaken changes of the logits, and the log-probs ``[n, V]`` that each gives."""
        sampling, scale = self.sampling, self.sampling.logprob_temperature
        for sentence, temperature in wrong_temperatures(scale):
            yield f"where {sentence}", self.logprobs(replace(sampling, temperature=temperature))
        for change in self.changes:
            if (other := replace(sampling, **change)) not in (sampling, without(sampling, *change)):
                yield f"with {change} of other requests", self.logprobs(other)
        if without(sampling, *CHANGES) == sampling:
            return
        for name in CHANGES:
            if (left := without(sampling, name)) != sampling:
                yield f"without {name}, at some places or at all", self.logprobs(left)
        for order in permutations(CHANGES):
            yield f"after the changes {', '.join(order)}, in this order", self.logprobs(order=order)
        for sentence, count in COUNTED.items():
            yield f"with penalties that count {sentence}", self.logprobs(count=count)
        late = tuple((token, scale * bias) for token, bias in sampling.logit_bias)
        yield (
            "with a bias that the temperature does not divide",
            self.logprobs(replace(sampling, logit_bias=late)),
        )

    def wrong_cut(self, margin: float) -> str | None:
        """The mistake that leaves all drawn tokens and fewest others; ``margin`` is that of `left_by_cut`."""
        sampling, full = self.sampling, self.logprobs()
        alone = [without(sampling, *(name for name in CUTS if name != cut)) for cut in CUTS]
        cuts = [
            ("each cut counts the tokens that the others drop", full, alone),
            (
                "changes of logits do not reach the cut, or have no effect",
                [rows.log_softmax(-1) for rows in self.logits],
                [sampling],
            ),
            *((f"{name} has no effect", full, [without(sampling, name)]) for name in CUTS),
            *((f"draws {sentence}", rows, [sampling]) for sentence, rows in self.mistakes()),
        ]
        sizes = {}
        for sentence, parts, options in cuts:
            left = [torch.stack([left_by_cut(rows, one, margin) for one in options]) for rows in parts]
            masks = [rows.isfinite().all(0) for rows in left]
            if all(bool(drawn.all()) for drawn in self.at(masks)):
                sizes[sentence] = sum(int(mask.sum()) for mask in masks)
        return min(sizes, key=lambda sentence: sizes[sentence], default=None)


def _changed(row: Tensor, counted: Sequence[int], sampling: SamplingParams, order: Sequence[str]) -> Tensor:
    """The logits ``row [V]`` with penalties on the ``counted`` tokens, one token at a time."""
    row = row.clone()
    for name in order:
        if name == "logit_bias":
            for token, bias in sampling.logit_bias:
                row[token] += bias
        for token in counted if name != "logit_bias" else ():
            if name == "presence_penalty":
                row[token] -= sampling.presence_penalty
            else:
                factor = sampling.repetition_penalty
                row[token] *= 1 / factor if row[token] > 0 else factor
    return row
