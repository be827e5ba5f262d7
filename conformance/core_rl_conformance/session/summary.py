"""Summary of a session: outcomes, certified and missing capabilities, and the report behind ``--report``."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path

import pytest

from core_rl import __version__
from core_rl.config.capability import Capability
from core_rl.machine import describe_machine
from core_rl.registry.engines import list_engines
from core_rl.registry.spec import PROTOCOL_VERSION
from core_rl_conformance.case import Target
from core_rl_conformance.catalogue import Check, load_checks, natural_order
from core_rl_conformance.outcomes import CaseRecord, Outcome, worst_of
from core_rl_conformance.report.certify import certify, judge, needs_of
from core_rl_conformance.report.code import engine_code, suite_code
from core_rl_conformance.report.files import ReportError, check_destination, write_report
from core_rl_conformance.report.model import CheckRecord, EngineRecord, Report
from core_rl_conformance.session.items import Plan, asked_checks
from core_rl_conformance.session.order import Mending, failing_models, lines_of, mendings

SYMBOLS = {
    Outcome.PASSED: "ok",
    Outcome.FAILED: "FAILED",
    Outcome.NOT_SUPPORTED: "-",
    Outcome.WAIVED: "waived",
    Outcome.NOT_RUN: "not run",
}
PACKAGES = {Capability.ADAMW_8BIT: "torchao"}
"""Capabilities that a package brings: without it no check of them can be run, which the report states."""
SLOWEST = 10
"""Number of listed slowest cases."""
FINISHED = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)


class Summary:
    """Gathers results; a case that reports twice keeps the worse outcome."""

    def __init__(self, plan: Plan, narrowed: bool) -> None:
        self.plan = plan
        self.narrowed = narrowed
        self._results: dict[tuple[str, ...], CaseRecord] = {}

    @property
    def results(self) -> list[CaseRecord]:
        """All results, in the order in which they came."""
        return list(self._results.values())

    def add(self, result: CaseRecord) -> None:
        """Take one result; the report on a teardown repeats it, without a message."""
        key = (result.engine, result.partner, result.check, result.layout, result.model, result.dtype)
        known = self._results.get(key)
        if known is None or known.outcome not in (Outcome.FAILED, result.outcome):
            self._results[key] = result

    def _mendings(self, target: Target) -> list[Mending]:
        return mendings([case for case in self.results if case.engine == target.spec.name], load_checks())

    def firsts(self) -> dict[tuple[str, str], str]:
        """The failed check to fix before another, with the reason, by engine and failed check."""
        return {
            (target.spec.name, check): f"{one.check}: {reason}"
            for target in self.plan.targets
            for one in self._mendings(target)
            for check, reason in one.after.items()
        }

    # ------------------------------------------------------------ emptiness

    def problems(self) -> dict[str, list[str]]:
        """Gaps in the proof of a session, by engine; empty lists where it does not."""
        return {target.spec.name: list(self._problems(target)) for target in self.plan.targets}

    def _problems(self, target: Target) -> Iterator[str]:
        name = target.spec.name
        engine_results = [result for result in self.results if result.engine == name]
        partners = [result for result in self.results if result.partner == name]
        if not any(result.outcome.executed for result in engine_results + partners):
            yield "no check was executed; look at the paths and filters, and run with --pyargs core_rl_conformance"
        elif not self.narrowed:
            shown = {
                name for result in engine_results if result.outcome.executed for name in result.capabilities
            }
            for capability in sorted(target.spec.capabilities & self._certifiable(target)):
                if capability not in shown:
                    yield (
                        f"it declares {capability.value!r}, and no check of that was executed; "
                        "add a layout, dtype or model to its profile, or do not declare it"
                    )

    def _certifiable(self, target: Target) -> set[Capability]:
        """Capabilities that some check can show of such an engine, in this environment."""
        checks = [check for check in load_checks().values() if check.kind == target.kind]
        shown = {capability for check in checks if check.partner is None for capability in check.requires}
        shown |= {Capability.BFLOAT16}
        shown |= {Capability.CUDA} if self.plan.selection.device == "cuda" else set()
        shown -= {capability for capability, package in PACKAGES.items() if find_spec(package) is None}
        return shown | {
            need for place in target.profile.places for need in place.layout.needed_capabilities()
        }

    # -------------------------------------------------------------- terminal

    def write(self, terminal: pytest.TerminalReporter) -> None:
        """The tables at the end of a session."""
        terminal.write_sep("=", "core-rl conformance")
        for target in self.plan.targets:
            self._write_engine(terminal, target)
        self._write_slowest(terminal)
        for target in self.plan.targets:
            of_target = [result for result in self.results if result.engine == target.spec.name]
            for line in failing_models(of_target):
                terminal.write_line(f"{target.noun} {target.spec.name}: {line}")
            if lines := lines_of(self._mendings(target)):
                terminal.write_line(f"{target.noun} {target.spec.name}: fix in this order:")
                terminal.write_line("\n".join(f"  {line}" for line in lines))
        for name, problems in self.problems().items():
            for problem in problems:
                terminal.write_line(f"NOT A SUCCESS: engine {name!r}: {problem}")

    def _write_engine(self, terminal: pytest.TerminalReporter, target: Target) -> None:
        engine_results = [result for result in self.results if result.engine == target.spec.name]
        models = dict.fromkeys(result.model for result in engine_results if result.outcome.executed)
        columns = list(dict.fromkeys((result.layout, result.dtype) for result in engine_results))
        heads = [layout if dtype == "float32" else f"{layout} {dtype}" for layout, dtype in columns]
        width = max((len(result.label) for result in engine_results), default=5)
        counts = {outcome: sum(result.outcome is outcome for result in engine_results) for outcome in Outcome}
        shown = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
        terminal.write_line(f"{target.noun} {target.spec.name}: {shown}")
        terminal.write_line(f"  models: {', '.join(models) or 'none'}")
        cells = [max(13, len(head)) for head in heads]
        line = "  ".join(map(str.ljust, heads, cells))
        terminal.write_line(f"  {'check'.ljust(width)}  {line}  largest error / allowed")
        for label in sorted({result.label for result in engine_results}, key=natural_order):
            rows = [result for result in engine_results if result.label == label]
            line = "  ".join(
                _cell(rows, *column).ljust(size) for column, size in zip(columns, cells, strict=True)
            )
            terminal.write_line(f"  {label.ljust(width)}  {line}  {worst_line(rows)}")
        needs = needs_of(load_checks().values(), target.kind)
        for capability in certify(target.spec.capabilities, engine_results, needs):
            reason = f" ({capability.reason})" if capability.reason else ""
            meaning = f": {capability.meaning}" if capability.meaning else ""
            terminal.write_line(f"  {capability.name}: {capability.state}{reason}{meaning}")

    def _write_slowest(self, terminal: pytest.TerminalReporter) -> None:
        slowest = sorted(self.results, key=lambda result: -result.seconds)[:SLOWEST]
        total = sum(result.seconds for result in self.results)
        starting = sum(result.starting_s for result in self.results)
        terminal.write_line(
            f"slowest of {len(self.results)} cases ({total:.1f} s in all, {starting:.1f} s of it starting ranks):"
        )
        for result in slowest:
            if result.seconds > 0:
                place = f"{result.engine} {result.layout} {result.model} {result.dtype}"
                terminal.write_line(f"  {result.seconds:6.2f} s  {result.check} {place}")


def _cell(rows: list[CaseRecord], layout: str, dtype: str) -> str:
    """The outcomes of one check on one layout, over all models."""
    matches = [row for row in rows if (row.layout, row.dtype) == (layout, dtype)]
    outcomes = list(dict.fromkeys(row.outcome for row in matches))
    return "/".join(SYMBOLS[outcome] for outcome in outcomes)


def worst_line(rows: list[CaseRecord]) -> str:
    """The largest error of ``rows`` next to its limit, or the reason why there is none."""
    if (closest := worst_of(rows)) is None:
        return next((row.reason for row in rows if row.reason), "")
    worst, _ = closest
    if worst.limit == 0:
        return "bitwise" if worst.error == 0 else f"differs: {worst.what}"
    return f"{worst.error:.1e} / {worst.limit:.1e}  {worst.what}"


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
        plan, firsts = self._summary.plan, self._summary.firsts()
        results = [_with_first(case, firsts) for case in self._summary.results]
        complete = not self._summary.narrowed and exitstatus in FINISHED
        kinds = {target.kind for target in plan.targets}
        checks = sorted(
            (
                _check(check)
                for check in (*load_checks().values(), *asked_checks(plan.selection))
                if check.kind in kinds
            ),
            key=lambda check: check.order,
        )
        entries = {entry.name: entry for entry in list_engines()}
        problems = self._summary.problems()
        engines = []
        for target in plan.targets:
            spec = target.spec
            engine_results = [case for case in results if case.engine == spec.name]
            # A trainer may have the name of an engine.
            entry = entries.get(spec.name) if target.trainer is None else None
            distribution = entry.distribution if entry else target.distribution or "(this process)"
            record = EngineRecord(
                name=spec.name,
                kind=target.kind,
                description=spec.description,
                distribution=distribution,
                version=entry.version if entry else target.version or "-",
                code=engine_code(spec, distribution),
                protocol=spec.protocol,
                capabilities=certify(spec.capabilities, engine_results, needs_of(checks, target.kind)),
                verdict=judge(engine_results, problems[spec.name], complete=complete),
                problems=tuple(problems[spec.name]),
            )
            engines.append(record)
        return Report(
            suite_version=__version__,
            suite_code=suite_code(),
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


def _with_first(case: CaseRecord, firsts: Mapping[tuple[str, str], str]) -> CaseRecord:
    """``case``, whose message names the failure to fix before it."""
    first = firsts.get((case.engine, case.check))
    if first is None or case.outcome is not Outcome.FAILED:
        return case
    return case.model_copy(update={"message": f"{case.message}\n  fix first: {first}"})


def _check(check: Check) -> CheckRecord:
    return CheckRecord(
        identifier=check.identifier,
        kind=check.kind,
        partner=check.partner,
        description=check.description,
        requires=tuple(sorted(check.requires)),
    )
