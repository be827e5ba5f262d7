"""Sequences that begin alike, in every way that a tree of shared prefixes has."""

from __future__ import annotations

import random
from collections.abc import Sequence

from core_rl_conformance.inputs.data import Ragged, Row, ragged

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
        rows.append(
            Row(
                ids=tuple(ids),
                mask=tuple(rng.random() < 0.7 for _ in ids),
                advantages=tuple(rng.randrange(-128, 129) / 64 for _ in ids),
                target=rng.randrange(-128, 129) / 64,
            )
        )
    return Ragged(tuple(rows))
