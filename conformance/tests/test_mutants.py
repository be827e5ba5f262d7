"""The suite can fail: every mutant is killed by the check that is meant for it, and no correct engine is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet
from mutants.all import MUTANTS
from mutants.bases import Packed, Replicated
from mutants.zoo import DP1, DP2, C, Mutant, run_check, spec_of

from core_rl.errors import CoreRLError
from core_rl_conformance.bench import Bench
from core_rl_conformance.catalogue import load_checks
from core_rl_conformance.reference.train import ReferenceEngine


def _parameters() -> list[ParameterSet]:
    """The first mutant of each family in a quick session, all of them otherwise."""
    first = {mutant.engine.__module__: mutant for mutant in reversed(MUTANTS)}.values()
    return [
        pytest.param(mutant, id=mutant.name, marks=() if mutant in first else pytest.mark.slow)
        for mutant in MUTANTS
    ]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with Bench(tmp_path_factory.mktemp("bench")) as made:
        yield made


@pytest.mark.parametrize("mutant", _parameters())
def test_mutant_is_killed_by_the_check_that_is_meant_for_it(
    bench: Bench, mutant: Mutant, tmp_path: Path
) -> None:
    spec = spec_of(mutant.engine, mutant.undeclared)
    bench.groups.timeout_s = mutant.timeout_s
    try:
        with pytest.raises((AssertionError, CoreRLError)) as caught:
            run_check(
                bench,
                mutant.killed_by,
                spec,
                layout=mutant.layout,
                family=mutant.family,
                directory=tmp_path,
                partner=mutant.partner,
            )
    finally:
        bench.groups.discard(spec.name)
        bench.servers.discard(spec.name)
    said = str(caught.value)
    assert re.search(mutant.says, said), f"{mutant.issue}: the message misses the cause:\n{said}"


def test_every_check_kills_a_mutant() -> None:
    assert set(load_checks()) - {mutant.killed_by for mutant in MUTANTS} == set()


def test_mutants_have_names_of_their_own() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names) >= 25


CORRECT = {
    "reference": (spec_of(ReferenceEngine, frozenset({C.DATA_PARALLEL})), DP1),
    "replicated": (spec_of(Replicated), DP2),
    "packed": (spec_of(Packed), DP2),
}


@pytest.mark.slow
@pytest.mark.parametrize("identifier", load_checks())
@pytest.mark.parametrize("engine", CORRECT)
def test_correct_engines_pass(bench: Bench, engine: str, identifier: str, tmp_path: Path) -> None:
    spec, layout = CORRECT[engine]
    if not load_checks()[identifier].requires <= spec.capabilities:
        pytest.skip("not supported")
    run_check(bench, identifier, spec, layout=layout, family="gpt2", directory=tmp_path)
