"""The order of checks, and of fixes: failures that build on another failure, or have its cause, come after it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from core_rl_conformance.catalogue import Check
from core_rl_conformance.hints.tokens import LOOKS_LIKE
from core_rl_conformance.outcomes import CaseRecord, Outcome

BASICS = {
    "I7.layers": 0,
    "I7.logprobs": 0,
    "I7.rollout-logprobs": 0,
    "I7.entropy": 1,
    "I8.temperature": 1,
    "I7.values": 1,
    "I1.gradients": 2,
    "T1.cross-entropy": 2,
    "T1.reinforce": 2,
    "I1.micro-batches": 3,
    "I4.grad-norm": 3,
    "I1.train-batch": 4,
    "I20.adamw": 4,
    "T6.steps": 4,
    "I7.adapter-logprobs": 6,
    "I20.adapter-gradients": 6,
    "I11.resume": 6,
    "I12.receive-disk": 6,
    "I12.receive-tensor": 6,
}
"""Checks that others build on, the most basic ones first."""
MODULES = {
    "outputs": 1,
    "contract": 1,
    "trainer_losses": 2,
    "trainer_steps": 4,
    "gradients": 3,
    "properties": 3,
    "steps": 5,
    "optimizer": 5,
    # of inference engines; ``updates`` come last, because they use up the server
    "rollouts": 0,
    "rollout_contract": 1,
    "sampling": 3,
}
"""The levels of the other checks, by module; unlisted modules build on everything."""
CAUSE = re.compile(rf"^ *(?:{LOOKS_LIKE}|last line of the \w+: )(?P<cause>.+)$", re.MULTILINE)
NUMBER = re.compile(r"\d[\d.]*(?:e[+-]\d+)?")
MOST_LETTERS = 100
"""Letters of a symptom."""
MOST_SHOWN = 10
"""Lines of a list."""
FEWEST_CASES = 3
"""Failures of a model that are more than an accident."""


def level(check: Check) -> int:
    """The number of levels that ``check`` builds on; 0 is the most basic."""
    module = check.function.__module__.rpartition(".")[2]
    return BASICS.get(check.identifier, MODULES.get(module, 6))


@dataclass(frozen=True, kw_only=True)
class Mending:
    """One failed check to fix, and the failed checks to look at again afterwards."""

    check: str
    symptom: str
    """A line of its message."""
    after: Mapping[str, str]
    """Reasons of the others, which come after it, by check."""


def mendings(results: Sequence[CaseRecord], checks: Mapping[str, Check]) -> list[Mending]:
    """The failed checks of one engine by their first failure, the most basic ones first."""
    failed: dict[Check, list[CaseRecord]] = {}
    for case in results:
        if case.outcome is Outcome.FAILED and case.check in checks:
            failed.setdefault(checks[case.check], []).append(case)
    first_of: dict[Check, Check] = {}
    followers: dict[Check, dict[str, str]] = {}
    for check in sorted(failed, key=lambda check: (check.identifier not in BASICS, _rank(check))):
        below, reason = _below(check, list(first_of), failed, results)
        first = first_of[check] = check if below is None else first_of[below]
        after = followers.setdefault(first, {})
        if below is not None:
            after[check.identifier] = reason
    return [
        Mending(check=check.identifier, symptom=_symptom(failed[check][0]), after=after)
        for check, after in followers.items()
    ]


def lines_of(mending: Sequence[Mending]) -> list[str]:
    """The list for a terminal; empty where nothing builds on anything."""
    if not any(one.after for one in mending):
        return []
    lines = []
    for number, one in enumerate(mending[:MOST_SHOWN], start=1):
        names = ", ".join(one.after)
        lines.append(f"{number}. {one.check}: {one.symptom}" + (f"; then again: {names}" if names else ""))
    rest = len(mending) - MOST_SHOWN
    return [*lines, *([f"and {rest} more"] if rest > 0 else [])]


def failing_models(results: Sequence[CaseRecord]) -> list[str]:
    """Lines about the models on which no case of an engine passed, where cases of another model did."""
    ran = [case for case in results if case.outcome.executed]
    passed = Counter(case.model for case in ran if case.outcome is not Outcome.FAILED)
    failed = Counter(case.model for case in ran if case.outcome is Outcome.FAILED)
    return [
        f"all {number} cases of {model} failed: leave it out of the profile's `families` unless the engine serves it"
        for model, number in failed.items()
        if passed and number >= FEWEST_CASES and not passed[model]
    ]


def _rank(check: Check) -> tuple[int, int]:
    position = list(BASICS).index(check.identifier) if check.identifier in BASICS else len(BASICS)
    return level(check), position


def _below(
    check: Check,
    earlier: Sequence[Check],
    failed: Mapping[Check, Sequence[CaseRecord]],
    results: Sequence[CaseRecord],
) -> tuple[Check | None, str]:
    """The part of ``earlier`` that explains the failure of ``check``, with the reason; None for a cause of its own."""
    causes = {_cause(case) for case in failed[check]}
    for basic in earlier:
        if "" not in causes and causes <= {_cause(case) for case in failed[basic]}:
            return basic, "it has the same cause"
    for basic in earlier:
        around = (_fails_around(basic.identifier, case, results) for case in failed[check])
        if _builds_on(check, basic) and all(around):
            return basic, "it fails too, and this builds on it"
    return None, ""


def _builds_on(check: Check, basic: Check) -> bool:
    """Whether right values of ``check`` need those of ``basic``; rules of the interface need no values."""
    return (
        basic.identifier in BASICS
        and basic.kind == check.kind
        and basic.requires <= check.requires
        and _rank(basic) < _rank(check)
        and not check.identifier.startswith("contract.")
    )


def _fails_around(check: str, case: CaseRecord, results: Sequence[CaseRecord]) -> bool:
    """Whether ``check`` failed wherever it ran next to ``case``: with its model, or else at its layout, or at all."""
    ran = [result for result in results if result.check == check and result.outcome.executed]
    places = (
        [one for one in ran if (one.layout, one.model, one.dtype) == (case.layout, case.model, case.dtype)],
        [one for one in ran if (one.layout, one.dtype) == (case.layout, case.dtype)],
        ran,
    )
    nearest = next(filter(None, places), [])
    return bool(nearest) and all(result.outcome is Outcome.FAILED for result in nearest)


def _cause(case: CaseRecord) -> str:
    """The cause that its message names, without the numbers of the case."""
    match = CAUSE.search(case.message)
    return "" if match is None else NUMBER.sub("#", match["cause"])


def _symptom(case: CaseRecord) -> str:
    match = CAUSE.search(case.message)
    lines = case.message.splitlines()[1:2] if match is None else [match["cause"]]
    return "".join(lines).strip()[:MOST_LETTERS]
