"""The pytest plugin behind ``--report``: a report from the end of a session."""

from __future__ import annotations

import shlex
from datetime import UTC, datetime
from pathlib import Path

import pytest

from core_rl import __version__
from core_rl.machine import describe_machine
from core_rl.registry.engines import list_engines
from core_rl.registry.spec import PROTOCOL_VERSION
from core_rl_conformance.catalogue import Check, load_checks
from core_rl_conformance.report.certify import certify, judge, needs_of
from core_rl_conformance.report.files import ReportError, check_destination, write_report
from core_rl_conformance.report.model import CheckRecord, EngineRecord, Report
from core_rl_conformance.session.summary import Summary

__all__ = ["ReportWriter"]

FINISHED = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)


class ReportWriter:
    """Writes the results of a session to ``path`` at its end."""

    def __init__(self, path: Path, config: pytest.Config, summary: Summary) -> None:
        try:
            check_destination(path)
        except ReportError as error:
            raise pytest.UsageError(str(error)) from error
        self._path = path
        self._config = config
        self._summary = summary
        self._written = ""

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
        plan, results = self._summary.plan, self._summary.results
        complete = not self._summary.narrowed and exitstatus in FINISHED
        checks = sorted(map(_check, load_checks().values()), key=lambda check: check.order)
        entries = {entry.name: entry for entry in list_engines()}
        problems = self._summary.problems()
        engines = []
        for spec in (target.spec for target in plan.targets):
            engine_results, entry = (
                [case for case in results if case.engine == spec.name],
                entries.get(spec.name),
            )
            record = EngineRecord(
                name=spec.name,
                kind=spec.kind,
                description=spec.description,
                distribution=entry.distribution if entry else "(this process)",
                version=entry.version if entry else "-",
                protocol=spec.protocol,
                capabilities=certify(spec.capabilities, engine_results, needs_of(checks, spec.kind)),
                verdict=judge(engine_results, problems[spec.name], complete=complete),
                problems=tuple(problems[spec.name]),
            )
            engines.append(record)
        return Report(
            suite_version=__version__,
            protocol=PROTOCOL_VERSION,
            created=datetime.now(UTC).replace(microsecond=0),
            command=shlex.join(["pytest", *map(str, self._config.invocation_params.args)]),
            seed=plan.selection.seed,
            complete=complete,
            environment=describe_machine((engine.distribution for engine in engines), extra="conformance"),
            engines=tuple(engines),
            checks=tuple(checks),
            results=tuple(results),
        )


def _check(check: Check) -> CheckRecord:
    return CheckRecord(
        identifier=check.identifier,
        kind=check.kind,
        partner=check.partner,
        description=check.description,
        requires=tuple(sorted(check.requires)),
        provisional=check.provisional,
    )
