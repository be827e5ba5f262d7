"""The kill matrix: its rows and its options."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from kill_matrix import Kill, KillMatrix

pytest_plugins = ["pytester"]

KILL = Kill(
    mutant="mean-of-means",
    issue="verl #1",
    check="I2.data-parallel",
    place="dp2 llama",
    seed=0,
    outcome="killed",
)
OTHER = replace(KILL, mutant="entropy-in-bits", check="I10.export")


def _matrix(*kills: Kill) -> KillMatrix:
    matrix = KillMatrix()
    for kill in kills:
        (records,) = Kill.from_properties([("else", 1), kill.to_property()])
        matrix.add(records)
    return matrix


def test_rows_are_mutants_and_columns_seeds() -> None:
    matrix = _matrix(OTHER, replace(KILL, seed=1), KILL, replace(OTHER, seed=1))
    lines = matrix.markdown().splitlines()
    assert lines[4] == "| mutant | issue | where | check that is meant for it | seed 0 | seed 1 |"
    assert lines[6:] == [
        "| mean-of-means | verl #1 | dp2 llama | I2.data-parallel | x | x |",
        "| entropy-in-bits | verl #1 | dp2 llama | I10.export | x | x |",
    ]
    assert matrix.summary.startswith("2 of 2 mutants are killed with every seed (0, 1)")


@pytest.mark.parametrize(("outcome", "cell"), [("survived", "SURVIVED"), ("killed for another reason", "x?")])
def test_mutant_must_die_with_every_seed(outcome: str, cell: str) -> None:
    missed = Kill(**{**vars(replace(KILL, seed=2)), "outcome": outcome})
    matrix = _matrix(KILL, OTHER, missed)
    assert matrix.summary.startswith("1 of 2 mutants are killed with every seed (0, 2)")
    assert f"| x | {cell} |" in matrix.markdown()
    assert cell in matrix.text()


def test_additional_kills_have_their_column() -> None:
    also = replace(KILL, check="I1.gradients", intended=False)
    lives = replace(also, check="I7.logprobs", outcome="survived")
    matrix = _matrix(also, lives, KILL, OTHER)
    assert "| I2.data-parallel | x | I1.gradients |" in matrix.markdown()
    assert "I7.logprobs" not in matrix.text()
    assert "I10.export" in matrix.text()


@pytest.mark.nightly
def test_seeds_multiply_the_zoo_and_give_a_file(pytester: pytest.Pytester) -> None:
    matches = Path(__file__).parent
    command = [
        f"--rootdir={matches.parents[2]}",
        "-p",
        "no:cacheprovider",
        str(matches / "test_mutants.py"),
        "-k",
        "entropy-in-bits and not correct",
        "--seeds=2",
        "--kill-matrix=matrix.md",
    ]
    result = pytester.runpytest_subprocess("-c", os.devnull, *command)
    result.assert_outcomes(passed=2, deselected=result.parseoutcomes()["deselected"])
    result.stdout.fnmatch_lines(["*kill matrix*", "entropy-in-bits *I7.pair-logprobs *x *x"])
    written = (pytester.path / "matrix.md").read_text(encoding="utf-8")
    assert "| entropy-in-bits | units | dp1 llama | I7.pair-logprobs | x | x |" in written
