"""Two correct context-parallel engines pass every check; the zoo holds what breaks them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet
from toy_cp import PROFILE, SPEC

from core_rl_conformance.case import Case, Target
from core_rl_conformance.catalogue import load_checks
from core_rl_conformance.engine_under_test import EngineUnderTest
from core_rl_conformance.expected_values import ExpectedValues
from core_rl_conformance.session.matrix import Selection, cases

TARGETS = {
    "gather": Target(spec=SPEC, profile=PROFILE),
    "ulysses": Target(
        spec=replace(SPEC, name="toy-ulysses", factory="toy_cp.ulysses:UlyssesBackend"), profile=PROFILE
    ),
}
FIRST = {"I7.logprobs", "I1.gradients"}
"""Checks of a daily run."""
ON_OTHER_LAYOUTS = {
    "I1.gradients",
    "I2.data-parallel",
    "I3.few-kv-heads",
    "I4.grad-norm",
    "I7.logprobs",
    "I11.other-layout",
    "I1.combined-batches",
    "I20.adamw",
}
"""Checks that see more on four ranks than on two."""


def _wanted(engine: str) -> Iterator[Case]:
    """All checks on ``cp2``, and some on ``dp2cp2`` and ``cp4``, models taking turns; fewer of the second engine."""
    for check in load_checks().values():
        everywhere = check.identifier in ON_OTHER_LAYOUTS
        for layout in ("cp2", "dp2cp2", "cp4"):
            if everywhere or (layout == "cp2" and engine == "gather"):
                selected = cases(check, TARGETS[engine], Selection(layouts=(layout,), quick=True))
                yield from (case for case in selected if not (case.not_run or case.not_supported))


def _parameters() -> list[ParameterSet]:
    return [
        pytest.param(
            case,
            id=f"{engine}-{case.check.identifier}-{case.setting}-{case.family}",
            marks=()
            if case.check.identifier in FIRST and str(case.setting) == "cp2"
            else pytest.mark.nightly,
        )
        for engine in TARGETS
        for case in _wanted(engine)
    ]


@pytest.fixture(scope="module")
def expected_values(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExpectedValues]:
    with ExpectedValues(tmp_path_factory.mktemp("expected_values")) as made:
        yield made


@pytest.mark.nightly
@pytest.mark.parametrize("case", _parameters())
def test_correct_engine_passes(expected_values: ExpectedValues, case: Case, tmp_path: Path) -> None:
    case.check.function(EngineUnderTest(case, expected_values, tmp_path))
