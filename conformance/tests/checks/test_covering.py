"""Covering arrays have each pair of choices, in few combinations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from core_rl_conformance.checks.combinations import covering_array, pairs_of, share

VALUES = st.lists(st.sampled_from("abcde"), min_size=1, max_size=4, unique=True)
OPTIONS = st.dictionaries(st.text("xyz", min_size=1, max_size=3), VALUES, min_size=2, max_size=6)


@given(options=OPTIONS, seed=st.integers(0, 9))
def test_array_has_each_pair(options: Mapping[str, Sequence[str]], seed: int) -> None:
    rows = covering_array(options, seed)
    covered = {pair for row in rows for pair in pairs_of(row)}
    for left, right in combinations(options, 2):
        for a in options[left]:
            for b in options[right]:
                assert frozenset({(left, a), (right, b)}) in covered
    assert all(row.keys() == options.keys() for row in rows)
    assert rows == covering_array(options, seed)


def test_array_is_short() -> None:
    assert len(covering_array(dict.fromkeys("uvwxyz", "abcd"))) < 35


@given(count=st.integers(1, 30), parts=st.integers(2, 6), turn=st.integers(0, 99))
def test_cases_run_all_combinations(count: int, parts: int, turn: int) -> None:
    rows = [{"row": str(number)} for number in range(count)]
    shares = [share(rows, part, parts, turn) for part in range(parts)]
    assert len(shares[0]) == 1
    assert [row for row in rows if any(row in others for others in shares[1:])] == rows
