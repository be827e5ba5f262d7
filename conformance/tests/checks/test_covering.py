"""Covering arrays have any two or three choices together, in few combinations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mutants.zoo import DP1, case_of

from core_rl.reference import SPEC as REFERENCE
from core_rl_conformance.checks import batches
from core_rl_conformance.checks.combinations import rows_of
from core_rl_conformance.engine_under_test import EngineUnderTest
from core_rl_conformance.expected_values import ExpectedValues
from core_rl_conformance.inputs.covering import Combination, covering_array, sets_of, share
from core_rl_conformance.profile import Profile

VALUES = st.lists(st.sampled_from("abcde"), min_size=1, max_size=4, unique=True)
OPTIONS = st.dictionaries(st.text("xyz", min_size=1, max_size=3), VALUES, min_size=2, max_size=6)


@given(options=OPTIONS, seed=st.integers(0, 9), strength=st.integers(2, 3))
def test_array_has_choices_together(options: Mapping[str, Sequence[str]], seed: int, strength: int) -> None:
    rows = covering_array(options, seed, strength)
    covered = {choices for row in rows for choices in sets_of(row, strength)}
    for names in combinations(options, strength):
        for values in product(*(options[name] for name in names)):
            assert frozenset(zip(names, values, strict=True)) in covered
    assert all(row.keys() == options.keys() for row in rows)
    assert rows == covering_array(options, seed, strength)


@pytest.mark.parametrize(("strength", "most"), [(2, 35), (3, 170)])
def test_array_is_short(strength: int, most: int) -> None:
    assert len(covering_array(dict.fromkeys("uvwxyz", "abcd"), strength=strength)) < most


@given(count=st.integers(1, 30), parts=st.integers(2, 6), turn=st.integers(0, 99))
def test_cases_run_all_combinations(count: int, parts: int, turn: int) -> None:
    rows = [{"row": str(number)} for number in range(count)]
    shares = [share(rows, part, parts, turn) for part in range(parts)]
    assert len(shares[0]) == 1
    assert [row for row in rows if any(row in others for others in shares[1:])] == rows


def test_models_of_a_check_run_all_rows(tmp_path: Path) -> None:
    families = ("qwen3", "qwen3_vl", "llama", "gpt2")
    case = case_of("I1.combined-batches", REFERENCE, layout=DP1, family="llama")
    target = replace(case.target, profile=Profile(families=families))
    rows: list[Combination] = []
    with ExpectedValues(tmp_path) as values:
        for family in ("llama", "gpt2"):
            subject = EngineUnderTest(replace(case, target=target, family=family), values, tmp_path)
            rows += rows_of(subject, batches.OPTIONS)
    assert sorted(rows, key=repr) == sorted(
        covering_array({n: [*v] for n, v in batches.OPTIONS.items()}), key=repr
    )
