"""The suite can fail: every mutant is killed by the check that is meant for it, and no correct engine is."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kill_matrix import Kill, Outcome
from mutants import eight_bit
from mutants.adapter_sync import RefusesScoresWithAdapters
from mutants.all import MUTANTS
from mutants.attack import attack, fits, other_checks, partner_of
from mutants.bases import Packed, Replicated
from mutants.images import QWEN, VISION, PackedByPositions
from mutants.interruptions import SERVING, Served
from mutants.rollout_draws import IgnoresSeeds
from mutants.shared_prefixes import SHARED, Sharing
from mutants.zoo import DP1, DP2, C, Mutant, make_engine, mutants_of, run_check, spec_of

from core_rl.reference.rollout import ReferenceRolloutBackend
from core_rl.reference.train import ReferenceBackend
from core_rl_conformance.catalogue import load_checks
from core_rl_conformance.expected_values import ExpectedValues


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Seed 0 in an ordinary session; in a proof of the suite, ``--seeds`` of them from ``--first-seed`` on."""
    if "seed" in metafunc.fixturenames:
        first = metafunc.config.getoption("first_seed")
        seeds = range(first, first + (metafunc.config.getoption("seeds") or 1))
        metafunc.parametrize("seed", seeds, ids=[f"seed{seed}" for seed in seeds])
    if "suspect" in metafunc.fixturenames:
        suspects = MUTANTS if metafunc.config.getoption("full") else ()
        metafunc.parametrize("suspect", suspects, ids=[mutant.name for mutant in suspects])


@pytest.fixture(scope="module")
def expected_values(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExpectedValues]:
    with ExpectedValues(tmp_path_factory.mktemp("expected_values"), make_engine=make_engine) as made:
        yield made


def _kill(mutant: Mutant, check: str, seed: int, message: str | None, intended: bool = True) -> Kill:
    outcome: Outcome = "survived"
    if message is not None:
        outcome = "killed" if not intended or re.search(mutant.says, message) else "killed for another reason"
    return Kill(
        mutant=mutant.name,
        issue=mutant.issue,
        check=check,
        place=f"{mutant.layout} {mutant.family}",
        seed=seed,
        outcome=outcome,
        intended=intended,
    )


@pytest.mark.sampled(12)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_dies_by_its_check(
    expected_values: ExpectedValues,
    mutant: Mutant,
    seed: int,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    message = attack(expected_values, mutant, load_checks()[mutant.killed_by], seed, tmp_path)
    kill = _kill(mutant, mutant.killed_by, seed, message)
    record_property(*kill.to_property())
    assert message is not None, f"{mutant.issue}: {mutant.killed_by} passes"
    assert kill.outcome == "killed", f"{mutant.issue}: the message misses the cause:\n{message}"


def test_mutant_under_every_check(
    expected_values: ExpectedValues,
    suspect: Mutant,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    """Fails for nothing: it fills the last column of the kill matrix."""
    for check in other_checks(suspect):
        try:
            message = attack(expected_values, suspect, check, 0, tmp_path / check.identifier)
        except Exception as error:  # noqa: BLE001 - whatever a check stumbles over fails its session
            message = str(error)
        record_property(*_kill(suspect, check.identifier, 0, message, intended=False).to_property())


def test_every_check_kills_a_mutant() -> None:
    killers = {mutant.killed_by for mutant in (*MUTANTS, *mutants_of(eight_bit))}
    # Checks of trainers have mutants in `test_trainer_mutants`.
    of_engines = {name for name, check in load_checks().items() if check.kind != "trainer"}
    assert of_engines - killers == set()


def test_mutants_have_names_of_their_own() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names) >= 25


CORRECT = {
    "reference": (spec_of(ReferenceBackend, frozenset({C.DATA_PARALLEL})), DP1, "gpt2"),
    "replicated": (spec_of(Replicated), DP2, "gpt2"),
    "packed": (spec_of(Packed), DP2, "gpt2"),
    "packed-images": (spec_of(Packed, declared=VISION), DP2, QWEN),
    "packed-by-positions": (spec_of(PackedByPositions, declared=VISION), DP2, QWEN),
    "sharing": (spec_of(Sharing, declared=SHARED), DP2, "gpt2"),
    "rollout": (spec_of(ReferenceRolloutBackend), DP1, "gpt2"),
    "without-seeds": (spec_of(IgnoresSeeds), DP1, "gpt2"),
    "without-scores-of-adapters": (spec_of(RefusesScoresWithAdapters), DP1, "llama"),
    "served": (spec_of(Served, declared=SERVING), DP1, "gpt2"),
}


def _correct() -> list[tuple[str, str]]:
    """Every correct engine with every check that fits it."""
    return [
        (engine, identifier)
        for engine, (spec, layout, family) in CORRECT.items()
        for identifier, check in load_checks().items()
        if fits(check, spec, layout.dp, family)
    ]


@pytest.mark.nightly
@pytest.mark.parametrize(("engine", "identifier"), _correct())
def test_correct_engines_pass(
    expected_values: ExpectedValues, engine: str, identifier: str, seed: int, tmp_path: Path
) -> None:
    spec, layout, family = CORRECT[engine]
    run_check(
        expected_values,
        identifier,
        spec,
        layout=layout,
        family=family,
        directory=tmp_path,
        seed=seed,
        partner=partner_of(load_checks()[identifier]),
    )
