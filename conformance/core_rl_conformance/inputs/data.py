"""The sequences that checks run on, as plain lists; the engine and the oracle each get their own form."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from core_rl.data.batch import SequenceBatch
from core_rl_conformance.inputs.tiny_vision import TinyImages, placeholders
from core_rl_oracle.oracle import OracleSequence

LENGTHS = (17, 2, 31, 5, 1, 23, 9, 40, 3, 12, 28, 7, 19, 4, 2, 14)
"""Unequal, with the shortest possible: a single token, which nothing predicts. Odd in all, and so are some of the
usual micro-batches on one, two and four data-parallel ranks."""

GIVEN_LENGTHS = (9, 1, 14, 6, 3, 7)
"""Lengths for a user's model, whose passes take seconds."""

LONG = (64, 47, 1, 58, 33, 64, 51, 29, 60, 44, 63, 38, 57, 2, 49, 62, 41, 55, 36, 61, 53, 46, 59, 40)
"""More than 1,024 tokens in all, which is more than the usual pieces of chunked kernels; some have the
largest length that the models take."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One sequence of ``L`` tokens: a prompt, which is not trained, and a response with holes in its mask."""

    ids: tuple[int, ...]
    mask: tuple[bool, ...]
    advantages: tuple[float, ...]
    target: float
    routing: tuple[tuple[tuple[int, ...], ...], ...] | None = None
    """Experts to choose for each token and layer; None leaves it to the routers."""
    images: TinyImages | None = None
    """Images, whose placeholders are among the ids."""
    copies: int = 1
    """For the oracle: the number of equal sequences that this one stands for, see `Repeated`."""

    def after(self, count: int) -> Row:
        """The same without its first ``count`` tokens."""
        ids, mask, advantages = self.ids[count:], self.mask[count:], self.advantages[count:]
        return replace(self, ids=ids, mask=mask, advantages=advantages)

    def for_oracle(self) -> OracleSequence:
        """The same for the oracle; the first token is never trained."""
        mask = torch.tensor((False, *self.mask[1:]))
        advantages = torch.tensor(self.advantages, dtype=torch.float64)
        fields = {
            "mask": mask,
            "copies": torch.tensor(self.copies),
            "advantages": advantages,
            "target": torch.tensor(self.target, dtype=torch.float64),
        }
        if self.routing is not None:
            fields["routing"] = torch.tensor(self.routing)
        media = {} if self.images is None else self.images.media()
        return OracleSequence(input_ids=list(self.ids), fields=fields, media=media)


@dataclass(frozen=True)
class Ragged:
    """Sequences of unequal lengths; hashable, so that computed values can be cached."""

    rows: tuple[Row, ...]

    @property
    def lengths(self) -> list[int]:
        return [len(row.ids) for row in self.rows]

    def select(self, indices: Sequence[int]) -> Ragged:
        """The sequences ``indices``, in that order."""
        return Ragged(tuple(self.rows[index] for index in indices))

    def with_ids(self, ids: Sequence[int]) -> Ragged:
        """The same with ``ids`` at the end of the first sequence, which is longer."""
        first, *rest = self.rows
        return Ragged((replace(first, ids=(*first.ids[: -len(ids)], *ids)), *rest))

    def ending_in(self, token: int) -> Ragged:
        """The same with ``token``, trained, at the end of each sequence and in the middle of the longer ones."""
        rows = []
        for row in self.rows:
            last = len(row.ids) - 1
            places = {last, last // 2} if last > 2 else {last}
            ids = tuple(token if t in places else other for t, other in enumerate(row.ids))
            mask = tuple(t in places or trained for t, trained in enumerate(row.mask))
            rows.append(replace(row, ids=ids, mask=mask))
        return Ragged(tuple(rows))

    def cut_at(self, lengths: Sequence[int]) -> Ragged:
        """The same packed tokens as sequences of other ``lengths``, as many and of the same sum."""
        ids = [token for row in self.rows for token in row.ids]
        mask = [trained for row in self.rows for trained in row.mask]
        advantages = [value for row in self.rows for value in row.advantages]
        rows, start = [], 0
        for row, length in zip(self.rows, lengths, strict=True):
            span = slice(start, start + length)
            start += length
            rows.append(
                replace(row, ids=tuple(ids[span]), mask=tuple(mask[span]), advantages=tuple(advantages[span]))
            )
        return Ragged(tuple(rows))

    def without_mask(self) -> Ragged:
        """The same sequences, of which no token is trained."""
        return Ragged(tuple(replace(row, mask=(False,) * len(row.mask)) for row in self.rows))

    def all_trained(self) -> Ragged:
        """The same sequences, of which every token is trained that something predicts."""
        return Ragged(tuple(replace(row, mask=(True,) * len(row.mask)) for row in self.rows))

    def batch(self) -> SequenceBatch:
        """The packed batch, with the fields ``loss_mask``, ``advantages`` and ``target`` (float32).

        And ``routing`` where it is given.
        """
        routing = [torch.tensor(row.routing) for row in self.rows if row.routing is not None]
        return SequenceBatch.from_sequences(
            [row.ids for row in self.rows],
            tokens={
                "loss_mask": [torch.tensor(row.mask) for row in self.rows],
                "advantages": [torch.tensor(row.advantages) for row in self.rows],
                **({"routing": routing} if routing else {}),
            },
            sequences={"target": torch.tensor([row.target for row in self.rows])},
            media=[{} if row.images is None else row.images.media() for row in self.rows]
            if any(row.images is not None for row in self.rows)
            else (),
        )

    def for_oracle(self) -> list[OracleSequence]:
        """The sequences one by one."""
        return [row.for_oracle() for row in self.rows]


@dataclass(frozen=True)
class Repeated:
    """Many sequences of which few are different, so that the oracle computes those few alone."""

    distinct: Ragged
    """Each different one, with its number of copies."""
    order: tuple[int, ...]
    """Index of the distinct sequence for each sequence of the batch."""

    @staticmethod
    def of(data: Ragged, order: Sequence[int]) -> Repeated:
        """The rows ``order`` of ``data``."""
        counts = [replace(row, copies=order.count(number)) for number, row in enumerate(data.rows)]
        return Repeated(Ragged(tuple(counts)), tuple(order))

    @property
    def all(self) -> Ragged:
        """Every sequence of the batch."""
        return self.distinct.select(self.order)


def part_edges(vocab_size: int) -> list[int]:
    """The last and first ids of halves and quarters of a vocabulary, with sizes rounded down or up."""
    sizes = {(size, parts) for parts in (2, 4) for size in (vocab_size // parts, -(-vocab_size // parts))}
    starts = {size * part for size, parts in sizes for part in range(1, parts)}
    return sorted({token for start in starts for token in (start - 1, start)})


def ragged(vocab_size: int, seed: int, lengths: Sequence[int] = LENGTHS) -> Ragged:
    """Random sequences. One of them is not trained at all, and the last begins as the longest does.

    The ids 0 to 2, which many take for padding, BOS and EOS, and the last token of the vocabulary stand in
    the middle and at the end of sequences: to the model they are tokens like others.
    """
    rng = random.Random(seed)
    rows = [_row(rng, vocab_size, length) for length in lengths]
    by_length = sorted(range(len(rows)), key=lambda index: lengths[index])
    if len(rows) > 2:
        untrained = by_length[len(rows) // 2]
        rows[untrained] = replace(rows[untrained], mask=(False,) * lengths[untrained])
        rows[-1] = replace(rows[-1], ids=rows[by_length[-1]].ids[: lengths[-1]])
    return Ragged(tuple(rows))


def given(sequences: Sequence[tuple[int, ...]], seed: int) -> Ragged:
    """Six of a user's ``sequences``, in turn by ``seed``, with masks and advantages as in `ragged`."""
    count = len(GIVEN_LENGTHS)
    ids = [sequences[(seed * count + number) % len(sequences)] for number in range(count)]
    rows = ragged(3, seed, [len(sequence) for sequence in ids]).rows
    return Ragged(tuple(replace(row, ids=sequence) for row, sequence in zip(rows, ids, strict=True)))


IMAGE_SIZES = (((4, 2),), ((2, 4), (2, 2)), ((4, 4),))
"""Images of sequences in turn: a wide one has other positions than a high one."""


def with_images(data: Ragged, family: str, seed: int) -> Ragged:
    """The same with images of ``family`` in every second long sequence, and the same image in two of them.

    Placeholders stand in the place of other tokens, at the beginning or after a few of them, and are not trained.
    """
    rows, pictured = [], 0
    for number, row in enumerate(data.rows):
        sizes = IMAGE_SIZES[pictured % len(IMAGE_SIZES)]
        ids = [token for size in sizes for token in placeholders(family, size)]
        if number % 2 or len(ids) > len(row.ids) - 4:
            rows.append(row)
            continue
        first = 3 * (pictured % 2)
        span = range(first, first + len(ids))
        images = TinyImages(family, seed + pictured // 2 if len(sizes) == 1 else seed, sizes)
        rows.append(
            replace(
                row,
                ids=(*row.ids[:first], *ids, *row.ids[span.stop :]),
                mask=tuple(trained and t not in span for t, trained in enumerate(row.mask)),
                images=images,
            )
        )
        pictured += 1
    return Ragged(tuple(rows))


def _row(rng: random.Random, vocab_size: int, length: int) -> Row:
    prompt = rng.randrange(0, max(1, length // 2) + 1)
    mask = tuple(t >= prompt and rng.random() > 0.15 for t in range(length))
    ids = [rng.randrange(vocab_size) for _ in range(length)]
    special = (0, 1, 2, vocab_size - 1)
    for place in (length // 2, length - 1):
        if place and rng.random() < 0.5:
            ids[place] = rng.choice(special)
    return drawn_row(rng, ids, mask)


def drawn_row(rng: random.Random, ids: Iterable[int], mask: Iterable[bool]) -> Row:
    """A sequence with drawn advantages and target: multiples of 1/64, which are exact in every dtype."""
    tokens = tuple(ids)
    advantages = tuple(rng.randrange(-128, 129) / 64 for _ in tokens)
    return Row(ids=tokens, mask=tuple(mask), advantages=advantages, target=rng.randrange(-128, 129) / 64)


PIECES: Sequence[Sequence[tuple[int, int]]] = (
    ((0, 16), (1, 12)),
    ((4, 1), (5, 9)),
    ((0, 16), (2, 20)),
    ((0, 16), (3, 7)),
    ((6, 11),),
    ((0, 16),),
    ((0, 16), (3, 7)),
    ((4, 1), (7, 15)),
    ((0, 16), (3, 7), (8, 5)),
    ((0, 16), (3, 4), (9, 7)),
    ((4, 1),),
)
"""The random rows that each sequence consists of, and the tokens of each.

A prompt has answers, of which two are equal, one continues another, one leaves another half-way and one is empty. Two
sequences share a single token, which is a sequence too, and one shares nothing."""


def prefix_trees(vocab_size: int, seed: int) -> Ragged:
    """Two trees and a sequence alone. Masks and advantages differ between sequences also where tokens are shared."""
    source = ragged(vocab_size, seed, lengths=(24,) * 10).rows
    rng = random.Random(seed)
    rows = []
    for pieces in PIECES:
        ids = [token for number, count in pieces for token in source[number].ids[:count]]
        rows.append(drawn_row(rng, ids, [rng.random() < 0.7 for _ in ids]))
    return Ragged(tuple(rows))
