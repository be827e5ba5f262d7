"""Covering arrays: few combinations of options in which any two, or any three, choices occur together."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, product

Choice = tuple[str, str]
"""An option and its value."""
Combination = Mapping[str, str]
"""A value for each option."""
PAIRS = 2


def sets_of(combination: Combination, strength: int = PAIRS) -> Iterator[frozenset[Choice]]:
    """Each ``strength`` choices of ``combination``."""
    yield from map(frozenset, combinations(combination.items(), strength))


def covering_array(
    options: Mapping[str, Sequence[str]],
    seed: int = 0,
    strength: int = PAIRS,
    begin: Sequence[Combination] = (),
) -> list[Combination]:
    """Combinations of ``options`` in which any ``strength`` choices, of as many options, occur together.

    They ``begin`` with given ones. Equal for equal arguments. Greedy: each combination begins with choices that are
    still missing, and takes for each further option, in a drawn order, the value with most missing choices (Cohen et
    al., "The AETG system", 1997).
    """
    draw = random.Random(seed)
    missing = {
        frozenset(zip(names, values, strict=True))
        for names in combinations(options, strength)
        for values in product(*(options[name] for name in names))
    }
    rows = list(begin)
    for given in begin:
        missing.difference_update(sets_of(given, strength))
    while missing:
        row = dict(draw.choice(sorted(map(sorted, missing))))
        rest = [name for name in options if name not in row]
        for name in draw.sample(rest, len(rest)):
            values = draw.sample(list(options[name]), len(options[name]))
            row[name] = max(values, key=lambda value: _gain(row, (name, value), missing, strength))
        missing.difference_update(sets_of(row, strength))
        rows.append({name: row[name] for name in options})
    return rows


def share(
    rows: Sequence[Combination], part: int, parts: int, turn: int, least: int = 1
) -> Sequence[Combination]:
    """The combinations of a case, of which ``parts`` run ``rows`` between them.

    The first has ``least``, which take turns, since quick sessions run no other; the others have all.
    """
    if parts == 1:
        return rows
    if part:
        return rows[part - 1 :: parts - 1]
    return [rows[(turn + number * len(rows) // least) % len(rows)] for number in range(least)]


def _gain(row: Combination, choice: Choice, missing: set[frozenset[Choice]], strength: int) -> int:
    """The number of ``missing`` sets that ``choice`` adds to ``row``."""
    return sum(frozenset({choice, *others}) in missing for others in combinations(row.items(), strength - 1))


def shrink(row: Combination, usual: Combination, fails: Callable[[Combination], bool]) -> Combination:
    """The failing ``row`` with as many ``usual`` values as it fails with, one option after the other."""
    for name, value in usual.items():
        simpler = {**row, name: value}
        if simpler != row and fails(simpler):
            row = simpler
    return row
