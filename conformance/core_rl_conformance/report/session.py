"""The pytest plugin behind ``--report``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import pytest

from core_rl_conformance.catalogue import load_checks
from core_rl_conformance.outcomes import CaseResult, Outcome
from core_rl_conformance.report.build import build_report
from core_rl_conformance.report.files import ReportError, check_destination, write_report
from core_rl_conformance.report.model import CaseRecord, Report
from core_rl_conformance.session.items import Plan

__all__ = ["ReportWriter"]

FINISHED = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
Key = tuple[str, str, str, str, str]


class Summary(Protocol):
    """The properties of a session that a report needs besides its results."""

    @property
    def plan(self) -> Plan: ...

    @property
    def narrowed(self) -> bool: ...

    def problems(self) -> Mapping[str, Sequence[str]]:
        """By engine, why the session proves less than it seems to."""


class ReportWriter:
    """Gathers the results of a session and writes them to ``path`` at its end."""

    def __init__(self, path: Path, config: pytest.Config, summary: Summary) -> None:
        try:
            check_destination(path)
        except ReportError as error:
            raise pytest.UsageError(str(error)) from error
        self._path = path
        self._config = config
        self._summary = summary
        self._cases: dict[Key, CaseRecord] = {}
        self._written = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep a result, and what a failed check said; of two reports on one case, the first or the failure."""
        result = CaseResult.from_properties(report.user_properties)
        if result is None:
            return
        key = (result.engine, result.check, result.layout, result.model, result.dtype)
        known = self._cases.get(key)
        if known is None or known.outcome not in (Outcome.FAILED, result.outcome):
            failed = result.outcome in (Outcome.FAILED, Outcome.WAIVED)
            message = report.longreprtext if failed else ""
            self._cases[key] = CaseRecord.of(result, message)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Write the report; a session that should have left one, and could not, is no success."""
        if self._config.option.collectonly:
            return
        try:
            page = write_report(self._report(exitstatus), self._path)
        except ReportError as error:
            self._written = f"NO REPORT: {error}"
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        else:
            self._written = f"report: {self._path} and {page}"

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._written:
            terminalreporter.write_line(self._written)

    def _report(self, exitstatus: int) -> Report:
        plan = self._summary.plan
        return build_report(
            specs=[target.spec for target in plan.targets],
            checks=load_checks().values(),
            results=list(self._cases.values()),
            command=["pytest", *map(str, self._config.invocation_params.args)],
            seed=plan.selection.seed,
            complete=not self._summary.narrowed and exitstatus in FINISHED,
            problems=self._summary.problems(),
        )
