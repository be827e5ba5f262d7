"""Checks as pytest items.

Not as test functions: fixtures, name patterns and plugins of the directory that the suite happens to run
in must not change its behaviour.
"""

from __future__ import annotations

import importlib
import re
import shutil
import sysconfig
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pytest

from core_rl.errors import ConfigError, CoreRLError, LayoutError, RankTimeout, UnsupportedCapability
from core_rl_conformance.case import Case, Target
from core_rl_conformance.catalogue import Check, checks_in, declared_checks
from core_rl_conformance.checks.rollout_pairs import standstill_checks
from core_rl_conformance.engine_under_test import EngineUnderTest
from core_rl_conformance.expected_values import ExpectedValues
from core_rl_conformance.given_model import GivenModel
from core_rl_conformance.outcomes import (
    CaseRecord,
    LostRequests,
    MeasurementRecord,
    NotRun,
    NotSupported,
    Outcome,
)
from core_rl_conformance.session.matrix import Selection, cases, pair_cases, quick_sample, three_rank_cases
from core_rl_conformance.soak import soak_check

FRAME = re.compile(r'^ *File "(?P<file>[^"]+)", line (?P<number>\d+)(?:,)? in (?P<function>.+)$')
FOREIGN = (sysconfig.get_path("stdlib"), "<frozen", "<string>")
INSTALLED = ("site-packages", "dist-packages")
OWN = "core_rl"
"""The package whose frames only pass calls on."""
SUITE = "core_rl_conformance"
"""The package whose frames only call."""
EXPECTED_VALUES = pytest.StashKey[ExpectedValues]()
LAST_LINES = 12
"""Shown lines of the traceback of an error that brings none of its own."""
HANGS = 2
"""Number of hangs on a layout after which an engine is left out."""


@dataclass(frozen=True, kw_only=True)
class _Frame:
    file: str
    number: str
    function: str
    source: str

    def __str__(self) -> str:
        return f"{self.file}, line {self.number}, in {self.function}" + (
            f": {self.source}" if self.source else ""
        )

    @property
    def rank(self) -> int:
        """0 for the engine's own code, 1 for a library, 2 for code that only passes calls on."""
        parts = Path(self.file).parts
        if any(self.file.startswith(start) for start in FOREIGN) or OWN in parts:
            return 2
        return 1 if any(name in parts for name in INSTALLED) else 0


def last_line(traceback: str) -> str | None:
    """The innermost frame of the engine's code in a traceback of Python's, or in stacks of a crash; None without any.

    Where it has none, that of a library counts. Stacks have the innermost frame first, and the thread that crashed is
    called the current one.
    """
    _, crashed, stacks = traceback.partition("Current thread")
    innermost_first = bool(crashed) or "most recent call first" in traceback
    text = stacks.split("\n\n")[0] if crashed else traceback
    frames = [frame for frame in _frames(text) if SUITE not in Path(frame.file).parts]
    if not innermost_first:
        frames.reverse()
    innermost = min(frames, key=lambda frame: frame.rank, default=None)  # the first of equals
    return None if innermost is None else str(innermost)


def _frames(text: str) -> Iterator[_Frame]:
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if match := FRAME.match(line):
            after = lines[number + 1] if number + 1 < len(lines) else ""
            source = after.strip() if after.startswith("    ") and not FRAME.match(after) else ""
            yield _Frame(
                file=match["file"], number=match["number"], function=match["function"], source=source
            )


class Plan(NamedTuple):
    """The engines and the selection of a session."""

    targets: list[Target]
    selection: Selection
    given: GivenModel | None = None
    """The user's model for train engines."""


PLAN = pytest.StashKey[Plan]()


def asked_checks(selection: Selection) -> list[Check]:
    """Checks that run by an option alone: of ``--lr0``, or the soak."""
    if selection.soak_minutes is not None:
        return [soak_check(60 * selection.soak_minutes)]
    return standstill_checks(selection.still_steps) if selection.still_steps else []


class CheckFile(pytest.File):
    """A module of `core_rl_conformance.checks`; its ``__init__`` stands for the checks of other distributions."""

    def collect(self) -> Iterator[pytest.Item]:
        plan = self.config.stash[PLAN]
        if plan.selection.soak_minutes is not None:
            yield from self._soaks(plan) if self.path.stem == "__init__" else ()
            return
        if self.path.stem == "__init__":
            checks = declared_checks()
            for check in asked_checks(plan.selection):
                yield from (CheckItem.build(self, case) for case in self._cases(check, plan))
        else:
            checks = checks_in(importlib.import_module(f"core_rl_conformance.checks.{self.path.stem}"))
        for check in checks:
            if plan.selection.wants(check.identifier):
                for case in self._cases(check, plan):
                    yield CheckItem.build(self, quick_sample(case, plan.targets, plan.selection))

    def _soaks(self, plan: Plan) -> Iterator[pytest.Item]:
        """A soak for each layout and dtype of each train engine; they share the time."""
        (whole,) = asked_checks(plan.selection)
        planned = [case for target in plan.targets for case in cases(whole, target, plan.selection)]
        share = soak_check(60 * (plan.selection.soak_minutes or 0) / max(1, len(planned)))
        for case in planned:
            yield CheckItem.build(self, replace(case, check=share))

    def _cases(self, check: Check, plan: Plan) -> Iterator[Case]:
        targets = [target for target in plan.targets if check.any_model or not target.given]
        for target in targets:
            yield from cases(check, target, plan.selection)
            yield from three_rank_cases(check, target, plan.selection)
        yield from pair_cases(check, targets, plan.selection)


class CheckItem(pytest.Item):
    """One case of a check."""

    case: Case
    seconds: float
    starting_s: float
    measurements: list[MeasurementRecord]
    reproduction: str

    @classmethod
    def build(cls, parent: CheckFile, case: Case) -> CheckItem:
        """The item of ``case``, with a strict expected failure if the profile waives it."""
        name = f"{case.check.identifier}[{case.name}]"
        # As text, which pytest reads back from its cache for --lf: it keeps the brackets apart from the name.
        item: CheckItem = cls.from_parent(parent, name=name, nodeid=f"{parent.nodeid}::{name}")
        item.case = case
        item.seconds = item.starting_s = 0.0
        item.measurements = []
        item.reproduction = ""
        for waiver in case.target.profile.waivers:
            if waiver.covers(case.check.identifier, case.setting, case.family, case.dtype):
                reason = f"waived: {waiver.reason} (owner: {waiver.owner})"
                item.add_marker(pytest.mark.xfail(strict=True, raises=waiver.raises, reason=reason))
        return item

    def setup(self) -> None:
        if reason := self.case.not_supported or self.case.not_run:
            pytest.skip(reason)

    @property
    def _place(self) -> tuple[str, str]:
        """Whose hangs count together: those of a train engine on one layout, or of a server."""
        serves = self.case.target.kind == "inference"
        return self.case.target.spec.name, "" if serves else str(self.case.setting)

    def runtest(self) -> None:
        expected_values = self.config.stash[EXPECTED_VALUES]
        if expected_values.groups.hangs[self._place] >= HANGS:
            # Each one takes the whole timeout, and the session has failed already.
            hung = f"it hung in {HANGS} checks at {self.case.setting} before"
            lost = f"the engine loses requests: in {HANGS} checks before"
            self._skip(replace(self.case, not_run=hung if self._place[1] else lost))
        if self._place[0] in expected_values.servers.silent:
            self._skip(replace(self.case, not_run="the server did not respond in a check before"))
        directory = expected_values.directory / "cases" / self.name.replace("/", "_")
        directory.mkdir(parents=True)
        subject = EngineUnderTest(self.case, expected_values, directory)
        started, starting_s = time.monotonic(), expected_values.groups.starting_s
        try:
            self.case.check.function(subject)
        except NotRun as reason:
            self._skip(replace(self.case, not_run=str(reason)))
        except NotSupported as reason:
            self._skip(replace(self.case, not_supported=str(reason)))
        except (CoreRLError, TimeoutError) as error:
            added = self.case.setting == self.case.target.three_ranks and isinstance(error, LayoutError)
            if added or (self.case.target.given and isinstance(error, ConfigError | UnsupportedCapability)):
                self._skip(replace(self.case, not_supported=f"refused: {error}".splitlines()[0]))
            if isinstance(error, RankTimeout | LostRequests | TimeoutError):
                expected_values.groups.hangs[self._place] += 1
            for target in filter(None, (self.case.target, self.case.partner)):
                expected_values.discard(target.spec.name)
            raise
        finally:
            self.seconds = time.monotonic() - started
            self.starting_s = expected_values.groups.starting_s - starting_s
            self.measurements, self.reproduction = subject.measurements, subject.reproduction
            # Checkpoints add up over some hundred cases.
            shutil.rmtree(directory, ignore_errors=True)

    def _skip(self, case: Case) -> NoReturn:
        self.case = case
        pytest.skip(case.not_supported or case.not_run)

    def result(self, outcome: Outcome, reason: str) -> CaseRecord:
        """Record of its result."""
        case = self.case
        return CaseRecord(
            check=case.check.identifier,
            engine=case.target.spec.name,
            partner="" if case.partner is None else case.partner.spec.name,
            layout=str(case.setting),
            model=case.family,
            dtype=case.dtype,
            seed=case.seed,
            outcome=outcome,
            seconds=self.seconds,
            starting_s=self.starting_s,
            capabilities=tuple(sorted(case.capabilities)),
            measurements=tuple(self.measurements),
            reason=reason,
            reproduction=self.reproduction if outcome in (Outcome.FAILED, Outcome.WAIVED) else "",
        )

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> str:
        """The check's message; of any other error, where in the check it came up as well."""
        error = excinfo.value
        if str(error).startswith(f"{self.case.check.identifier}: "):
            return str(error)
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code is not CheckItem.runtest.__code__:
            trace = trace.tb_next
        frames = "".join(traceback.format_exception(type(error), error, trace))
        notes = getattr(error, "__notes__", None) or frames.splitlines()[-LAST_LINES:]
        place = last_line("\n".join([str(error), *notes])) or last_line(frames)
        problem = [] if place is None else [f"last line of the {self.case.target.noun}: {place}"]
        problem += [f"{type(error).__name__}: {error}", *notes]
        return self.case.failure_message("\n".join(problem))

    def reportinfo(self) -> tuple[Path, int | None, str]:
        code = self.case.check.function.__code__
        return self.path, code.co_firstlineno, self.name
