"""First failure to fix, named in later messages."""

from __future__ import annotations

from dataclasses import replace

from mutants.zoo import DP1, DP2, spec_of

from core_rl.config.layout import ParallelLayout
from core_rl.reference.train import ReferenceBackend
from core_rl_conformance.case import Case, Target
from core_rl_conformance.catalogue import load_checks
from core_rl_conformance.profile import Profile, Setting
from core_rl_conformance.session.items import BASICS, Failures, level


def _case(identifier: str, layout: ParallelLayout = DP1, family: str = "llama") -> Case:
    return Case(
        check=load_checks()[identifier],
        target=Target(spec=spec_of(ReferenceBackend), profile=Profile()),
        setting=Setting(layout=layout),
        family=family,
        dtype="float32",
        seed=0,
        device="cpu",
    )


def test_most_basic_failure_is_named() -> None:
    failures = Failures()
    assert failures.add(_case("I7.logprobs")) == ""
    assert failures.add(_case("I1.gradients")) == "I7.logprobs fails too: fix it first"
    assert failures.add(_case("I11.resume")) == "I7.logprobs fails too: fix it first"
    assert failures.add(_case("I1.gradients", layout=DP2)) == ""
    assert failures.add(_case("I20.adamw", layout=DP2)) == "I1.gradients fails too: fix it first"
    assert failures.add(_case("I20.adamw", family="gpt2")) == ""
    other_engine = replace(_case("I20.adamw"), target=Target(spec=spec_of(_Other), profile=Profile()))
    assert failures.add(other_engine) == ""


class _Other(ReferenceBackend):
    """An engine of another name."""


def test_failure_omits_checks_built_on_it() -> None:
    failures = Failures()
    failures.add(_case("I20.adamw"))
    assert failures.add(_case("I1.gradients")) == "" and failures.add(_case("I7.logprobs")) == ""


def test_basic_checks_run_before_checkpoints() -> None:
    checks = load_checks()
    assert set(BASICS) <= set(checks)
    assert level(checks["I7.logprobs"]) < level(checks["I1.micro-batches"]) < level(checks["I11.resume"])
