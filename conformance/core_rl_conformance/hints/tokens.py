"""Compared token outputs, packed, with the known facts of each token; and the factor between two tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import torch
from torch import Tensor

from core_rl.config.layout import ParallelLayout
from core_rl.data.batch import SequenceBatch
from core_rl.data.micro_batch import MicroBatchSpec, count_micro_batches, plan_micro_batches, shard_plan
from core_rl_oracle.tolerance import Tolerance

LOOKS_LIKE = "it looks like: "
"""Begins a line that names a cause."""
LARGEST_PART = 64
"""Fractions are recognized up to this numerator and denominator."""
PLAUSIBLE_PART = 8
"""Larger parts must be powers of two: no code divides by 35 or multiplies by 38."""


@dataclass(frozen=True, kw_only=True)
class Places:
    """Ids, masks and positions of the tokens of a batch, packed ``[T]`` in its order."""

    ids: Tensor
    trained: Tensor
    """Bool: tokens that the loss reads."""
    rank: Tensor
    """The data-parallel rank that each one is on."""
    vocab_size: int
    order: Tensor
    """Index of each one among the packed tokens of its micro-batch."""
    packed: Tensor
    """Number of tokens of that micro-batch."""
    number: Tensor
    """Index of each token's sequence in its micro-batch."""
    last: Tensor
    """Indices of the last tokens of sequences."""
    shards: tuple[int, ...] = ()
    """Numbers of ranks that the tokens of a micro-batch may be spread over: context and sequence parallelism."""

    @staticmethod
    def of(
        batch: SequenceBatch,
        vocab_size: int,
        layout: ParallelLayout | None = None,
        cut: MicroBatchSpec | None = None,
    ) -> Places:
        """The places in ``batch``, as a group of ``layout`` shards it and cuts it into micro-batches."""
        layout, cut = layout or ParallelLayout(), cut or MicroBatchSpec(count=1)
        rank, order, packed, number = (torch.zeros(batch.num_tokens, dtype=torch.long) for _ in range(4))
        parts = shard_plan(batch, layout.dp)
        count = max(count_micro_batches(batch.select(part), cut) for part in parts if part)
        for place, part in enumerate(parts):
            rank[batch.token_index(part)] = place
            for rows in plan_micro_batches(batch.select(part), cut, count) if part else ():
                index = batch.token_index([part[row] for row in rows])
                order[index], packed[index] = torch.arange(len(index)), len(index)
                lengths = torch.tensor([batch.lengths[part[row]] for row in rows], dtype=torch.long)
                number[index] = torch.arange(len(rows)).repeat_interleave(lengths)
        cuts = (layout.cp, layout.tp if layout.sequence_parallel else 1)
        return Places(
            ids=batch.input_ids,
            trained=batch.loss_mask,
            rank=rank,
            vocab_size=vocab_size,
            order=order,
            packed=packed,
            number=number,
            last=batch.cu_seqlens[1:].long() - 1,
            shards=tuple(sorted({size for size in (*cuts, math.prod(cuts)) if size > 1})),
        )


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Compared values, one for each token (or sequence, at its last token), packed ``[T]``."""

    got: Tensor
    expected: Tensor
    wrong: Tensor
    """Bool: the difference, or any in its row, is too large or not a number."""
    sequence: Tensor
    position: Tensor
    lengths: list[int]
    scalars: bool
    """One value for each sequence instead of each token."""
    places: Places | None
    tolerance: Tolerance

    @staticmethod
    def of(
        got: Sequence[Tensor], expected: Sequence[Tensor], tolerance: Tolerance, places: Places | None
    ) -> Tokens:
        """Tokens from a tensor ``[L]``, ``[L, V]`` or ``[]`` for each sequence; ``places`` are of all their tokens."""
        pairs = zip(got, expected, strict=True)
        rows = [(a, b) if a.dim() else (a.reshape(1), b.reshape(1)) for a, b in pairs]
        lengths = [len(left) for left, _ in rows]
        left, right = torch.cat([row[0] for row in rows]).double(), torch.cat([row[1] for row in rows])
        wrong = ~((left - right.double()).abs() <= tolerance.limit)
        scalars = all(not value.dim() for value in expected)
        if scalars and places is not None:
            names = ("ids", "trained", "rank", "order", "packed", "number")
            places = replace(places, **{name: getattr(places, name)[places.last] for name in names})
        known = places is not None and len(places.ids) == len(wrong)
        return Tokens(
            got=left,
            expected=right.double(),
            wrong=wrong.flatten(1).any(1) if wrong.dim() > 1 else wrong,
            sequence=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
            position=torch.cat([torch.arange(length) for length in lengths]),
            lengths=lengths,
            scalars=scalars,
            places=places if known else None,
            tolerance=tolerance,
        )

    @property
    def length(self) -> Tensor:
        """The length of each token's sequence."""
        return torch.tensor(self.lengths)[self.sequence]

    @property
    def last(self) -> Tensor:
        """Which tokens end their sequence."""
        return self.position == self.length - 1


def show_factor(factor: float) -> str:
    """``factor`` as a number, and as the fraction or square root that it is near: ``0.5 (1/2)``."""
    return named_factor(factor) or f"{factor:.6g}"


def named_factor(factor: float) -> str | None:
    """The same for a fraction of small numbers or its root; None for any other number, and for 1."""
    plain, square = _fraction(factor), _fraction(factor * factor)
    if plain is not None:
        if plain == 1:
            return None
        return f"{factor:.6g}" if plain.denominator == 1 else f"{factor:.6g} ({plain})"
    return f"{factor:.6g} (sqrt({square}))" if square is not None and factor > 0 else None


def _fraction(value: float) -> Fraction | None:
    """The fraction of small numbers that ``value`` is, up to one part in 10,000."""
    if not math.isfinite(value) or not value:
        return None
    near = Fraction(value).limit_denominator(LARGEST_PART)
    plausible = near != 0 and all(
        part <= PLAUSIBLE_PART or (part <= LARGEST_PART and part.bit_count() == 1)
        for part in (abs(near.numerator), near.denominator)
    )
    return near if plausible and abs(float(near) / value - 1) <= 1e-4 else None


def constant_factor(got: Tensor, expected: Tensor, tolerance: Tolerance) -> float | None:
    """The number that all of ``expected`` was multiplied by (up to 0.1 %), if there is one other than 1.

    It must explain every entry, entries near 0 included, but for a tenth of its distance from 1.
    """
    got, expected = got.detach().double().flatten(), expected.detach().double().flatten()
    if got.numel() < 2 or not bool(torch.isfinite(got).all()):
        return None
    large = expected.abs() > max(100 * tolerance.limit, 1e-3 * float(expected.abs().max()))
    if int(large.sum()) < 2:
        return None
    factor = float((got[large] / expected[large]).median())
    if not factor or abs(factor - 1) <= 1e-6:
        return None
    allowed = (
        min(1e-3 * abs(factor), 0.1 * abs(factor - 1)) * expected.abs()
        + max(1.0, abs(factor)) * tolerance.limit
    )
    return factor if bool(((got - factor * expected).abs() <= allowed).all()) else None
