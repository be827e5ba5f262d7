"""Covering arrays: few combinations of options, among which each pair of choices occurs."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

Choice = tuple[str, str]
"""An option and its value."""
Combination = Mapping[str, str]
"""A value for each option."""


def pairs_of(combination: Combination) -> Iterator[frozenset[Choice]]:
    """Each two choices of ``combination``."""
    yield from map(frozenset, combinations(combination.items(), 2))


def covering_array(options: Mapping[str, Sequence[str]], seed: int = 0) -> list[dict[str, str]]:
    """Combinations of ``options`` in which any two choices, of two options, occur together; equal for equal arguments.

    Greedy: each combination begins with a pair that is still missing, and takes for each further option, in a drawn
    order, the value with most missing pairs (Cohen et al., "The AETG system", 1997).
    """
    draw = random.Random(seed)
    missing = {
        frozenset({(left, a), (right, b)})
        for left, right in combinations(options, 2)
        for a in options[left]
        for b in options[right]
    }
    rows = []
    while missing:
        row = dict(draw.choice(sorted(map(sorted, missing))))
        rest = [name for name in options if name not in row]
        for name in draw.sample(rest, len(rest)):
            values = draw.sample(list(options[name]), len(options[name]))
            row[name] = max(values, key=lambda value: _gain(row, (name, value), missing))
        missing.difference_update(pairs_of(row))
        rows.append({name: row[name] for name in options})
    return rows


def share(rows: Sequence[Combination], part: int, parts: int, turn: int) -> Sequence[Combination]:
    """The combinations of a case, of which ``parts`` run ``rows`` between them.

    The first has a single one, which takes turns, since quick sessions run no other; the others have all.
    """
    if parts == 1:
        return rows
    return [rows[turn % len(rows)]] if part == 0 else rows[part - 1 :: parts - 1]


def _gain(row: Combination, choice: Choice, missing: set[frozenset[Choice]]) -> int:
    """The number of ``missing`` pairs that ``choice`` adds to ``row``."""
    return sum(frozenset({choice, other}) in missing for other in row.items())
