"""The suite rejects the engine with a planted bug, and passes it without one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import mindspore_mutants
import pytest
from mutants.zoo import DP1, DP2, make_engine, run_check

from core_rl.errors import CoreRLError
from core_rl_conformance.catalogue import load_checks
from core_rl_conformance.expected_values import ExpectedValues
from core_rl_mindspore import SPEC


@pytest.fixture(scope="module")
def expected_values(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExpectedValues]:
    with ExpectedValues(tmp_path_factory.mktemp("expected"), make_engine=make_engine) as values:
        yield values


def failure_message(expected_values: ExpectedValues, factory: str, check: str, directory: Path) -> str | None:
    """The failure of ``check`` on an engine of ``factory``; None where it passes."""
    spec = replace(SPEC, name=factory.partition(":")[2].lower(), factory=factory)
    layout = DP2 if load_checks()[check].min_dp > 1 else DP1
    try:
        run_check(expected_values, check, spec, layout=layout, family="qwen3", directory=directory)
    except (AssertionError, CoreRLError) as error:
        return str(error)
    finally:
        expected_values.discard(spec.name)
    return None


@pytest.mark.parametrize(("mutant", "check"), mindspore_mutants.KILLED_BY.items())
def test_mutant_dies(expected_values: ExpectedValues, mutant: str, check: str, tmp_path: Path) -> None:
    assert failure_message(expected_values, f"mindspore_mutants:{mutant}", check, tmp_path) is not None


@pytest.mark.parametrize("check", sorted(set(mindspore_mutants.KILLED_BY.values())))
def test_engine_survives(expected_values: ExpectedValues, check: str, tmp_path: Path) -> None:
    assert failure_message(expected_values, SPEC.factory, check, tmp_path) is None
