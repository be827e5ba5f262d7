"""Correct engines with pipeline and with expert parallelism pass every check; the zoo holds what breaks them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import toy_ep
import toy_pp
from _pytest.mark import ParameterSet

from core_rl_conformance.case import Case, Target
from core_rl_conformance.catalogue import load_checks
from core_rl_conformance.engine_under_test import EngineUnderTest
from core_rl_conformance.expected_values import ExpectedValues
from core_rl_conformance.session.matrix import Selection, cases

TARGETS = {
    "pp2": Target(spec=toy_pp.SPEC, profile=toy_pp.PROFILE),
    "dp2pp2": Target(spec=toy_pp.SPEC, profile=toy_pp.PROFILE),
    "dp2ep2": Target(spec=toy_ep.SPEC, profile=toy_ep.PROFILE),
}
FIRST = {"I7.logprobs", "I1.gradients"}
"""Checks of a daily run."""
ON_FOUR_RANKS = {"I1.gradients", "I2.data-parallel", "I4.grad-norm", "I7.logprobs", "I1.combined-batches"}
"""Checks that see more on four ranks than on two."""


def _wanted(layout: str, target: Target) -> Iterator[Case]:
    for check in load_checks().values():
        if layout != "dp2pp2" or check.identifier in ON_FOUR_RANKS:
            selected = cases(check, target, Selection(layouts=(layout,), quick=True))
            yield from (case for case in selected if not (case.not_run or case.not_supported))


def _parameters() -> list[ParameterSet]:
    return [
        pytest.param(
            case,
            id=f"{case.check.identifier}-{layout}-{case.family}",
            marks=() if case.check.identifier in FIRST and layout != "dp2pp2" else pytest.mark.nightly,
        )
        for layout, target in TARGETS.items()
        for case in _wanted(layout, target)
    ]


@pytest.fixture(scope="module")
def expected_values(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExpectedValues]:
    with ExpectedValues(tmp_path_factory.mktemp("expected_values")) as made:
        yield made


@pytest.mark.nightly
@pytest.mark.parametrize("case", _parameters())
def test_correct_engine_passes(expected_values: ExpectedValues, case: Case, tmp_path: Path) -> None:
    case.check.function(EngineUnderTest(case, expected_values, tmp_path))
