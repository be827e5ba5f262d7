"""Sessions with ``--trainer``: names, specs, and the report."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from plugin_support import run

from core_rl.config.layout import ParallelLayout
from core_rl.errors import ConfigError
from core_rl_conformance.catalogue import load_checks
from core_rl_conformance.outcomes import Outcome
from core_rl_conformance.profile import Profile, Waiver
from core_rl_conformance.report.files import read_report
from core_rl_conformance.session.matrix import Selection, load_target, pair_cases, three_rank_cases
from core_rl_conformance.session.session import load_trainer
from core_rl_conformance.trainers.spec import Feature, TrainerSpec

pytest_plugins = ["pytester"]

SPEC = TrainerSpec(
    name="imitator",
    factory="trainers.plain:PlainTrainer",
    description="Imitates, and no more",
    objectives=frozenset({"cross_entropy"}),
    aggregations=frozenset({"token_mean"}),
    features=frozenset({Feature.GRADIENTS, Feature.EPOCHS}),
    profile=Profile(families=("llama",)),
)
WRONG_NAME = replace(SPEC, name="Imi tator")
WAIVED = replace(
    SPEC,
    factory="trainers.mutants:WeighedImitation",
    profile=Profile(
        families=("llama",),
        waivers=(Waiver(check="T1.cross-entropy", reason="a mutant", owner="me", raises=AssertionError),),
    ),
)
NO_TRAINER = replace(SPEC, factory="pathlib:Path")
NOT_INSTALLED = replace(SPEC, package="not-installed-anywhere")
MALFORMED_WAIVER = replace(
    SPEC,
    profile=Profile(
        families=("llama",), waivers=(Waiver(check="T9.none", reason="", owner="me", raises=AssertionError),)
    ),
)
MALFORMED = replace(
    SPEC,
    factory="nothing",
    aggregations=frozenset(),
    log_ratio_clamp=0.0,
    features=frozenset(),
    profile=Profile(layouts=(ParallelLayout(tp=2),)),
)
OTHER = "no spec"


def _load(name: str) -> object:
    return load_trainer(f"{__name__}:{name}", {"T1.cross-entropy"})


@pytest.mark.parametrize(
    ("name", "messages"),
    [
        ("OTHER", ["expected a TrainerSpec, found 'no spec'"]),
        ("WRONG_NAME", ["name 'Imi tator' must be lower-case letters"]),
        ("NOT_INSTALLED", ["needs not-installed-anywhere, which is not installed"]),
        ("MALFORMED_WAIVER", ["the waiver of 'T9.none' names no check of this suite", "has no reason"]),
        (
            "MALFORMED",
            [
                "factory 'nothing' must be of the form 'module:Class'",
                "aggregations is empty",
                "log_ratio_clamp is 0.0; give a number above 0",
                "features has neither 'gradients' nor 'sgd'",
                "layout tp2 of its profile has more than data-parallel ranks",
            ],
        ),
    ],
)
def test_wrong_specs_are_refused(name: str, messages: list[str]) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011  of the core or of the suite
        _load(name)
    assert all(message in str(caught.value) for message in messages), str(caught.value)


def test_unknown_trainer_lists_installed_ones() -> None:
    with pytest.raises(
        ConfigError, match="--trainer=nobody: no installed trainer is called so; installed: .*core-rl"
    ):
        load_trainer("nobody", {})


def test_trainers_are_no_partners_of_engines() -> None:
    checks, selection = load_checks(), Selection()
    trainer = load_trainer(f"{__name__}:SPEC", checks)
    engine = load_target("reference", checks)
    paired = [case for check in checks.values() for case in pair_cases(check, [engine, trainer], selection)]
    assert paired == []


def test_session_reports_the_trainer(pytester: pytest.Pytester, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    arguments = [f"--trainer={__name__}:SPEC", "--pyargs", "core_rl_conformance", f"--report={path}"]
    result = run(pytester, *arguments, "--check=T[158].*")
    result.stdout.fnmatch_lines(
        ["trainer imitator: 3 passed, 0 failed, 9 not supported, 0 waived, 0 not run"]
    )
    report = read_report(path)
    (trainer,) = report.engines
    outcomes = {case.check: case.outcome for case in report.results}
    assert (trainer.name, trainer.kind, report.schema_version) == ("imitator", "trainer", "1.5")
    assert outcomes["T1.cross-entropy"] is outcomes["T8.epochs"] is Outcome.PASSED
    assert outcomes["T5.advantages"] is Outcome.NOT_SUPPORTED


@pytest.mark.nightly
def test_waived_failure_keeps_its_message(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        f"--trainer={__name__}:WAIVED",
        "--pyargs",
        "core_rl_conformance",
    ]
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])
    options = ["--check=T1.cross-entropy", "-n", "1", "--report=report.json", "-p", "no:cacheprovider"]
    subprocess.run(
        [*command, *options], cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths}, check=True, timeout=300
    )
    (case,) = read_report(tmp_path / "report.json").results
    assert case.outcome is Outcome.WAIVED and case.message.startswith("T1.cross-entropy: trainer 'imitator'")


def test_added_ranks_take_checks_of_trainers_alone() -> None:
    checks = load_checks()
    target = load_trainer("core-rl", checks)
    added = [one for check in checks.values() for one in three_rank_cases(check, target, Selection())]
    assert {one.check.identifier for one in added} == {"T1.aggregations", "T3.order"}
    assert {one.layout.dp for one in added} == {3}


def test_factory_without_methods_is_named(pytester: pytest.Pytester) -> None:
    arguments = [f"--trainer={__name__}:NO_TRAINER", "--pyargs", "core_rl_conformance", "--check=T8.epochs"]
    result = run(pytester, *arguments)
    result.stdout.fnmatch_lines(["*'pathlib:Path' has no method build, train_batch, weights, close*"])
