"""Rollouts for trainers: sequences with log-probs of an old policy and of a reference, rewards and groups."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from statistics import fmean

import torch
from torch import Tensor

from core_rl_conformance.inputs.data import Ragged
from core_rl_conformance.trainers.interface import TrainSequence
from core_rl_oracle.group_advantages import group_advantages
from core_rl_oracle.loss_names import AdvantageRule
from core_rl_oracle.oracle import OracleSequence

LENGTHS = (17, 8, 31, 5, 11, 23, 9, 40, 6, 12, 28, 7, 19, 4, 13, 14)
"""Tokens of each sequence, four of one prompt after the other."""
GROUP = 4
"""Completions of a prompt."""
PAIR = 2
ORDINARY = 3
"""The first id that is neither a padding token nor BOS nor EOS of common tokenizers."""
BOUNDS = (math.log(0.8), math.log(1.2), math.log(1.28))
NEAREST = 0.02
"""Distance of a sequence's mean log-ratio from a clip bound: rounding must not decide on which side it is."""
PARTS = 64
"""Numbers are multiples of 1/64, exact in float32 at the size of a log-prob."""


@dataclass(frozen=True, kw_only=True)
class Distance:
    """Old policy and reference of each token as seen from the trained policy, in nats."""

    log_ratios: tuple[float, ...]
    """Of the trained policy to the old one."""
    references: tuple[float, ...] = (0.0,)
    """Of the reference to the trained policy, up to 0.5 on both sides."""
    advantages: int = 1
    """Factor of the advantages."""


NEAR = Distance(log_ratios=(-0.5, -0.33, -0.1, 0.06, 0.12, 0.33, 0.5, 1.3))
"""Below, between and above the clip bounds."""
BELOW = Distance(
    log_ratios=(-12.0, -8.0, -6.0, -4.0, 0.06), references=(-24.0, -12.0, -5.0, -3.0, 0.0), advantages=16
)
ABOVE = Distance(log_ratios=(0.06, 3.0, 4.0, 6.0, 8.0), references=(0.0, 2.0, 4.0, 6.0, 8.0), advantages=16)
"""As `BELOW` beyond usual clamps, on one side alone, so that large terms hide no small ones."""


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One sequence; hashable."""

    ids: tuple[int, ...]
    mask: tuple[bool, ...]
    advantages: tuple[float, ...]
    old: tuple[float, ...]
    ref: tuple[float, ...]
    reward: float
    group: int

    def for_trainer(self) -> TrainSequence:
        """The form that a trainer takes."""
        return TrainSequence(
            input_ids=torch.tensor(self.ids),
            loss_mask=torch.tensor(self.mask),
            advantages=torch.tensor(self.advantages),
            old_logprobs=torch.tensor(self.old),
            ref_logprobs=torch.tensor(self.ref),
            reward=self.reward,
            group=self.group,
        )

    def for_oracle(self) -> OracleSequence:
        """The form that the judge takes."""
        fields = {"advantages": self.advantages, "old_logprobs": self.old, "ref_logprobs": self.ref}
        floats = {name: torch.tensor(values, dtype=torch.float64) for name, values in fields.items()}
        return OracleSequence(input_ids=list(self.ids), fields={"mask": torch.tensor(self.mask), **floats})


@dataclass(frozen=True)
class Rollouts:
    """A batch; hashable, so that computed values can be cached."""

    rows: tuple[Rollout, ...]
    paired: bool = False
    """Neighbours are pairs, the preferred sequence first."""

    def select(self, indices: Sequence[int]) -> Rollouts:
        """The sequences ``indices``, in that order."""
        return self._with(self.rows[index] for index in indices)

    def _with(self, rows: Iterable[Rollout]) -> Rollouts:
        return replace(self, rows=tuple(rows))

    def for_trainer(self) -> list[TrainSequence]:
        """The sequences one by one, for a trainer."""
        return [row.for_trainer() for row in self.rows]

    def for_oracle(self) -> list[OracleSequence]:
        """The sequences one by one, or the pairs, for the judge."""
        rows = [row.for_oracle() for row in self.rows]
        if not self.paired:
            return rows
        return [
            replace(first, partner=second) for first, second in zip(rows[::PAIR], rows[1::PAIR], strict=True)
        ]

    def with_advantages(self, values: Sequence[float]) -> Rollouts:
        """The same with one advantage for all tokens of each sequence."""
        return self._with(
            replace(row, advantages=(value,) * len(row.ids))
            for row, value in zip(self.rows, values, strict=True)
        )

    def by_rule(self, rule: AdvantageRule) -> Rollouts:
        """The same with the advantages that ``rule`` takes from the rewards."""
        rewards, groups = [row.reward for row in self.rows], [row.group for row in self.rows]
        return self.with_advantages(group_advantages(rule, rewards, groups))

    def with_equal_rewards(self, group: int) -> Rollouts:
        """The same with equal rewards in ``group``."""
        rewards = {row.group: row.reward for row in self.rows}
        return self._with(
            replace(row, reward=rewards[group]) if row.group == group else row for row in self.rows
        )

    def with_value_zero(self, logprob: float) -> Rollouts:
        """The same from a policy that gives each token ``logprob``, with advantages whose sum is 0 in each sequence."""
        return self._with(
            replace(row, old=(logprob,) * len(row.ids), advantages=_cancelling(row.mask)) for row in self.rows
        )

    def untrained(self, indices: Sequence[int]) -> Rollouts:
        """The same without a trained token in the sequences ``indices``."""
        return self._with(
            replace(row, mask=(False,) * len(row.ids)) if index in indices else row
            for index, row in enumerate(self.rows)
        )

    def with_first_tokens(self) -> Rollouts:
        """The same with a mask that names the first token of each sequence as well, which nothing predicts."""
        return self._with(replace(row, mask=(True, *row.mask[1:])) for row in self.rows)

    def swapped(self) -> Rollouts:
        """The same pairs with the rejected sequence first."""
        return self.select([index ^ 1 for index in range(len(self.rows))])

    def without_reference(self) -> Rollouts:
        """The same with log-probs of 0 of the reference."""
        return self._with(replace(row, ref=(0.0,) * len(row.ids)) for row in self.rows)

    def ending_in(self, tokens: Sequence[int]) -> Rollouts:
        """The same whose last tokens are ``tokens`` in turn."""
        ends = cycle(tokens)
        return self._with(replace(row, ids=(*row.ids[:-1], next(ends))) for row in self.rows)


def draw_rollouts(
    logprobs: Sequence[Tensor],
    ids: Sequence[Sequence[int]],
    seed: int,
    *,
    holes: bool,
    of_tokens: bool,
    paired: bool = False,
    distance: Distance = NEAR,
) -> Rollouts:
    """Rollouts of sequences ``ids`` whose tokens have these ``logprobs`` in the trained policy.

    Each sequence has a trained token. With ``holes`` some tokens of completions are not trained, and with
    ``of_tokens`` advantages differ from token to token. If ``paired``, each two are a group, and begin with the prompt
    that `with_shared_prompts` has given them.
    """
    rng = random.Random(seed)
    size, rows = PAIR if paired else GROUP, []
    for index, (row_ids, values) in enumerate(zip(ids, logprobs, strict=True)):
        prompt = _shared(ids, index) if paired else rng.randrange(1, len(row_ids) // 2 + 1)
        group = index // size
        rows.append(
            _drawn(rng, row_ids, values.tolist(), prompt, group, distance, holes=holes, of_tokens=of_tokens)
        )
    return Rollouts(tuple(rows), paired=paired)


def with_shared_prompts(data: Ragged) -> Ragged:
    """The same as pairs of neighbours that begin alike; none ends in an id of padding, BOS or EOS."""
    ids = [row.ids for row in data.rows]
    rows = []
    for index, row in enumerate(data.rows):
        prompt = _shared(ids, index)
        end = max(ORDINARY, row.ids[-1])
        rows.append(replace(row, ids=(*ids[index - index % PAIR][:prompt], *row.ids[prompt:-1], end)))
    return Ragged(tuple(rows))


def _shared(ids: Sequence[Sequence[int]], index: int) -> int:
    """Tokens of the prompt of the pair that the sequence ``index`` is in."""
    first = index - index % PAIR
    return min(map(len, ids[first : first + PAIR])) // 2


def _drawn(
    rng: random.Random,
    ids: Sequence[int],
    logprobs: Sequence[float],
    prompt: int,
    group: int,
    distance: Distance,
    *,
    holes: bool,
    of_tokens: bool,
) -> Rollout:
    length = len(ids)
    mask = [t >= prompt and not (holes and rng.random() < 0.15) for t in range(length)]
    mask[-1] = True
    largest = distance.advantages
    advantages = [
        rng.choice((-largest, largest)) * rng.randrange(PARTS // 2, 2 * PARTS) / PARTS for _ in range(length)
    ]
    return Rollout(
        ids=tuple(ids),
        mask=tuple(mask),
        advantages=tuple(advantages if of_tokens else [advantages[0]] * length),
        old=_old(rng, mask, logprobs, distance.log_ratios),
        ref=tuple(
            min(0.0, _exact(value + rng.choice(distance.references) + rng.uniform(-0.5, 0.5)))
            for value in logprobs
        ),
        # Large, so that a small number next to a deviation does not show.
        reward=float(rng.randrange(4096)),
        group=group,
    )


def _old(
    rng: random.Random, mask: Sequence[bool], logprobs: Sequence[float], log_ratios: Sequence[float]
) -> tuple[float, ...]:
    """Log-probs, some exactly 0, of the policy that drew the tokens: no ratio or mean is near a clip bound."""
    possible = [[ratio for ratio in log_ratios if _is_clear(max(ratio, value))] for value in logprobs]
    while True:
        pairs = zip(logprobs, possible, strict=True)
        old = tuple(min(0.0, _exact(value - rng.choice(ratios))) for value, ratios in pairs)
        mean = fmean(own - other for own, other, use in zip(logprobs, old, mask, strict=True) if use)
        if _is_clear(mean):
            return old


def _is_clear(log_ratio: float) -> bool:
    return all(abs(log_ratio - bound) > NEAREST for bound in BOUNDS)


def _cancelling(mask: Sequence[bool]) -> tuple[float, ...]:
    """Advantages of 1 and -1 in turn; their sum over the trained tokens, of which the last one is, is 0."""
    signs = cycle((1.0, -1.0))
    values = [next(signs) if trained else 0.0 for trained in mask]
    return (*values[:-1], values[-1] - sum(values))


def _exact(value: float) -> float:
    return round(value * PARTS) / PARTS
