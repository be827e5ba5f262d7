"""Masks of dropout, from the metrics of a training pass, and tests of them as random draws."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from core_rl.config.layout import ParallelLayout
from core_rl.data.micro_batch import MicroBatchSpec, plan_micro_batches, shard_plan
from core_rl_conformance.engine_under_test import EngineUnderTest
from core_rl_conformance.expected_values import ExpectedGradients
from core_rl_conformance.inputs.data import Ragged, Row
from core_rl_conformance.inputs.losses import WatchedLoss
from core_rl_conformance.inputs.tiny_models import TinyModel
from core_rl_conformance.outcomes import NotRun
from core_rl_conformance.procedures.draws import FALSE_ALARMS, Event, least_probable
from core_rl_oracle.dropout import MaskedPairs, all_masks, plain_gradients, plain_outputs
from core_rl_oracle.oracle import Gradients, Oracle, grad_norm
from core_rl_oracle.plain import PlainModel
from core_rl_oracle.tolerance import scalar_tolerance, tolerance, tolerances

RATE = 0.25
"""Far from its complement, which a mask that is read the wrong way round has."""
CUT = MicroBatchSpec(count=8)
"""Micro-batches of each rank; every number of pipeline stages divides it."""
COUNT = 64
"""Sequences on each data-parallel rank."""
FIRSTS, SECONDS, MOST_PAIRS = 4, 8, 8
"""Ids that are tried as first and second token, and pairs of them that are used."""
LONG = 40
"""Tokens of the same sequences with others behind, which the two at the beginning do not see."""
CLEAR = 4.0
"""Results of two masks differ by this many times the tolerance, so that one value has one mask."""
HEADS = 2
"""With two layers, 16 masks."""


class PairMasks:
    """Pairs of first tokens of sequences, whose log-prob and entropy identify the heads that dropout keeps."""

    loss = WatchedLoss()

    def __init__(self, subject: EngineUnderTest) -> None:
        heads = max(HEADS, subject.layout.tp * subject.layout.cp)
        grouped = getattr(subject.model().config(), "num_key_value_heads", None) is not None
        self.model = TinyModel(
            family=subject.case.family,
            seed=subject.case.seed,
            dropout=RATE,
            dropout_at="attention",
            heads=heads,
            kv_heads=heads if grouped else None,
        ).with_multiples(*subject.case.multiples)
        self.masks = all_masks(self.model.config().num_hidden_layers, heads)
        self._oracle: Oracle = subject.expected.oracle(self.model)
        self._plain: PlainModel = subject.expected.plain(self.model, torch.float32)
        self._choose_pairs()
        rows = COUNT * subject.layout.dp
        self._pair = torch.arange(rows) % len(self._pairs)
        self.data, self.long_data = (
            Ragged(tuple(self._row(number, count) for number in range(rows))) for count in (2, LONG)
        )
        self.spread = Spread.of(self.data, subject.layout)

    def _choose_pairs(self) -> None:
        """Keep pairs of ids after which no two masks have nearly the same log-prob and entropy."""
        ids = torch.randperm(self.model.vocab_size, generator=torch.Generator().manual_seed(self.model.seed))
        grid = torch.cartesian_prod(ids[:FIRSTS], ids[FIRSTS : FIRSTS + SECONDS])
        every = _every(grid, self.masks.double() / (1 - RATE))
        truth, runs = self._exact(every), plain_outputs(self._plain, every)
        limits = [tolerance([run[n] for run in runs], truth[:, n], torch.float32).limit for n in (0, 1)]
        self._limits = torch.tensor(limits, dtype=torch.float64)
        values = (truth / self._limits).reshape(len(grid), len(self.masks), 2)
        gaps = torch.stack([_smallest_gap(rows) for rows in values])
        indices = gaps.argsort(descending=True)[:MOST_PAIRS]
        indices = indices[gaps[indices] > CLEAR]
        if not len(indices):
            raise NotRun(f"no pair of tokens tells the {len(self.masks)} masks of this model apart")
        self._pairs, self._values = grid[indices], values[indices]

    def _exact(self, pairs: MaskedPairs) -> Tensor:
        """Log-probs and entropies by the oracle, ``[N, 2]``."""
        with torch.no_grad():
            return torch.stack(pairs.outputs(self._oracle.model, exact=True), dim=-1)

    def _row(self, number: int, count: int) -> Row:
        first, second = self._pairs[self._pair[number]].tolist()
        rest = tuple(place % self.model.vocab_size for place in range(2, count))
        mask = tuple(place == 1 for place in range(count))
        return Row(ids=(first, second, *rest), mask=mask, advantages=(1.0,) * count, target=float(number))

    def found(self, subject: EngineUnderTest, when: str, metrics: dict[str, float]) -> Tensor:
        """The heads that the pass with these ``metrics`` has kept, bool ``[sequences, layers, heads]``."""
        got = self.loss.watched(metrics, len(self.data.rows)) / self._limits
        nearest, known = self._nearest(got, self._values)
        if not bool(known.all()):
            subject.require(False, self._not_a_mask(when, got, known))
        return self.masks[nearest]

    def _nearest(self, got: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The mask of each sequence whose ``values [pairs, masks, 2]`` are nearest, and whether it explains them."""
        distance = (got[:, None] - values[self._pair]).abs().amax(-1).min(dim=1)
        return distance.indices, distance.values <= 1.0

    def _explained_by(self, got: Tensor, factors: Tensor) -> Tensor:
        """Whether each sequence can be explained by some of ``factors [M, layers, heads]``; bool."""
        values = self._exact(_every(self._pairs, factors)) / self._limits
        return self._nearest(got, values.reshape(len(self._pairs), len(factors), 2))[1]

    def _not_a_mask(self, when: str, got: Tensor, known: Tensor) -> str:
        """The failure, with the kind of mistake that explains it."""
        problem = f"{when}: {int((~known).sum())} of {len(got)} log-probs are those of no mask at rate {RATE}"
        off = self._explained_by(got, torch.ones_like(self.masks[:1], dtype=torch.float64))
        if bool(off.all()):
            return f"{problem}, but those without dropout: it is off in training"
        if bool((off | known).all()):
            return f"{problem}, but those without dropout{self.spread.where(~known)}"
        if bool(self._explained_by(got, self.masks.double()).all()):
            return f"{problem}: what dropout keeps is not multiplied by 1 / (1 - rate) = {1 / (1 - RATE):.4g}"
        numbers = range(self.masks.shape[1])
        for layers in (list(some) for size in numbers[1:] for some in combinations(numbers, size)):
            factors = self.masks.double() / (1 - RATE)
            factors[:, layers] = 1.0
            if bool(self._explained_by(got, factors).all()):
                return f"{problem}: dropout is off in layers {layers}, and on in the others"
        return f"{problem}: it acts elsewhere, or not on whole attention weights, or at another rate"

    def gradients(self, keep_mask: Tensor) -> ExpectedGradients:
        """Loss and gradients of a pass that has kept these heads."""
        ids = self._pairs[self._pair]
        pairs = MaskedPairs(firsts=ids[:, 0], seconds=ids[:, 1], factors=keep_mask.double() / (1 - RATE))
        loss, grads = pairs.gradients(self._oracle.model, self.loss.entropy_coef, exact=True)
        runs = plain_gradients(self._plain, pairs, self.loss.entropy_coef)
        norms = [grad_norm(part) for _, part in runs]
        return ExpectedGradients(
            oracle=Gradients(loss=loss, weight=float(len(ids)), grads=grads),
            tolerances=tolerances([part for _, part in runs], grads, torch.float32),
            loss=scalar_tolerance([value for value, _ in runs], loss, torch.float32),
            norm=scalar_tolerance(norms, grad_norm(grads), torch.float32),
        )


def _every(grid: Tensor, factors: Tensor) -> MaskedPairs:
    """Each pair of ids of ``grid [P, 2]`` with each of ``factors [M, layers, heads]``."""
    ids = grid.repeat_interleave(len(factors), dim=0)
    return MaskedPairs(firsts=ids[:, 0], seconds=ids[:, 1], factors=factors.repeat(len(grid), 1, 1))


def _smallest_gap(values: Tensor) -> Tensor:
    """The smallest distance of two of the ``values [masks, 2]``, in the maximum norm."""
    distance = (values[:, None] - values[None]).abs().amax(-1)
    distance.fill_diagonal_(torch.inf)
    return distance.min()


@dataclass(frozen=True)
class Spread:
    """Sequences of each micro-batch of each data-parallel rank, in the order in which they are packed."""

    parts: tuple[tuple[tuple[int, ...], ...], ...]

    @staticmethod
    def of(data: Ragged, layout: ParallelLayout) -> Spread:
        """The spread of ``data`` in a group of ``layout`` that cuts it by `CUT`."""
        batch = data.batch()
        ranks = shard_plan(batch, layout.dp)
        cuts = [plan_micro_batches(batch.select(part), CUT, CUT.count or 1) for part in ranks]
        return Spread(
            tuple(
                tuple(tuple(part[row] for row in rows) for rows in cut)
                for part, cut in zip(ranks, cuts, strict=True)
            )
        )

    def where(self, wrong: Tensor) -> str:
        """Whether all ``wrong`` sequences, bool, are of further micro-batches or of one rank, in words."""
        positions = set(wrong.nonzero()[:, 0].tolist())
        if positions == set(self.of_micro_batches(slice(1, None))):
            return ", all in micro-batches after the first: dropout is off there"
        for rank in range(len(self.parts)):
            if positions == set(self.of_rank(rank)):
                return f", all on data-parallel rank {rank}: dropout is off there"
        return ": dropout is off in a part of the pass"

    def of_rank(self, rank: int) -> list[int]:
        """The sequences of ``rank``."""
        return [row for rows in self.parts[rank] for row in rows]

    def of_micro_batches(self, which: slice) -> list[int]:
        """The sequences of the micro-batches ``which`` of every rank."""
        return [row for rank in self.parts for rows in rank[which] for row in rows]


def verify_draws(subject: EngineUnderTest, passes: Sequence[tuple[str, Tensor]], spread: Spread) -> None:
    """Require that masks ``[sequences, layers, heads]`` of several passes are independent draws at `RATE`.

    A correct engine fails with a probability of `FALSE_ALARMS`.
    """
    counts = [count for when, keep_mask in passes for count in _counts(when, keep_mask, spread)]
    for (first, before), (when, keep_mask) in combinations(passes, 2):
        counts.append(_agreement(f"{when}: the masks are again those {first}", keep_mask, before))
    _require_chance(subject, counts)


def verify_rate_and_ranks(
    subject: EngineUnderTest, label: str, keep_mask: Sequence[Mapping[str, Tensor]]
) -> None:
    """Require that the masks of each data-parallel rank, by layer, are drawn at `RATE`, independently of rank 0.

    A rank may show other layers than rank 0 does: the common layers are compared.
    """
    counts = [
        _dropped(f"{label} is dropped on data-parallel rank {rank}", torch.cat(list(part.values())))
        for rank, part in enumerate(keep_mask)
    ]
    subject.require(any(event[1] for event in counts), f"{label} is never dropped: dropout is off there")
    for rank, part in enumerate(keep_mask[1:], 1):
        both = [layer for layer in part if layer in keep_mask[0]]
        subject.require(bool(both), f"the token of rank {rank} shows no layer that the one of rank 0 shows")
        left, right = (torch.cat([masks[layer] for layer in both]) for masks in (part, keep_mask[0]))
        which = f"{label} is dropped on data-parallel rank {rank} where it is on rank 0, or on neither"
        counts.append(_agreement(which, left, right))
    _require_chance(subject, counts)


def _require_chance(subject: EngineUnderTest, events: Sequence[Event]) -> None:
    """Require that the least probable of ``events`` is no surprise among so many."""
    worst = least_probable(events)
    subject.require(
        worst.tail >= FALSE_ALARMS,
        f"{worst.what} in {worst.count} of {worst.draws} cases; expected {worst.probability * worst.draws:.1f}. Masks "
        f"that are drawn independently, at a rate of {RATE:g}, give this with a probability below "
        f"{max(worst.tail, 1e-300):.0e}",
    )


def _counts(when: str, keep_mask: Tensor, spread: Spread) -> Iterator[Event]:
    """Rates of each part of a pass, and agreement of parts that should not agree."""
    _, layers, heads = keep_mask.shape
    yield _dropped(f"{when}: a head is dropped", keep_mask)
    for layer in range(layers):
        yield _dropped(f"{when}: a head of layer {layer} is dropped", keep_mask[:, layer])
    for head in range(heads):
        yield _dropped(f"{when}: head {head} is dropped", keep_mask[:, :, head])
    first, later = spread.of_micro_batches(slice(1)), spread.of_micro_batches(slice(1, None))
    yield _dropped(f"{when}: a head is dropped in the first micro-batch", keep_mask[first])
    yield _dropped(f"{when}: a head is dropped in micro-batches after the first", keep_mask[later])
    for rank in range(len(spread.parts)):
        yield _dropped(
            f"{when}: a head is dropped on data-parallel rank {rank}", keep_mask[spread.of_rank(rank)]
        )
    for rank in range(1, len(spread.parts)):
        label = f"{when}: the masks on data-parallel rank {rank} are those on rank 0"
        yield _agreement(label, keep_mask[spread.of_rank(rank)], keep_mask[spread.of_rank(0)])
    before, after = spread.of_micro_batches(slice(-1)), spread.of_micro_batches(slice(1, None))
    yield _agreement(
        f"{when}: the masks are those of the micro-batch before", keep_mask[after], keep_mask[before]
    )
    for layer in range(1, layers):
        yield _agreement(
            f"{when}: the masks of layer {layer} are those of layer 0", keep_mask[:, layer], keep_mask[:, 0]
        )
    for head in range(1, heads):
        label = f"{when}: the masks of head {head} are those of head 0"
        yield _agreement(label, keep_mask[:, :, head], keep_mask[:, :, 0])


def _dropped(label: str, keep_mask: Tensor) -> Event:
    return label, int((~keep_mask).sum()), keep_mask.numel(), RATE


def _agreement(label: str, left: Tensor, right: Tensor) -> Event:
    same = int((left == right).sum())
    return label, same, left.numel(), RATE**2 + (1 - RATE) ** 2
