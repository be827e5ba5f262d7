"""Failures of reports as workflow commands of GitHub Actions, which shows them at a pull request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from core_rl_conformance.outcomes import Outcome
from core_rl_conformance.report.model import Report

__all__ = ["annotations_of"]

ESCAPES = {"%": "%25", "\r": "%0D", "\n": "%0A"}
IN_PROPERTIES = ESCAPES | {":": "%3A", ",": "%2C"}


def annotations_of(reports: Iterable[Report]) -> Iterator[str]:
    """A line ``::error title=...::...`` for each failed case, and for each problem of an engine.

    https://docs.github.com/en/actions/reference/workflows-and-actions/workflow-commands
    """
    for report in reports:
        for engine in report.engines:
            for problem in engine.problems:
                yield _command("error", f"engine {engine.name}", problem)
        for case in report.results:
            if case.outcome is Outcome.FAILED:
                level = "warning" if case.provisional else "error"
                yield _command(level, f"{case.label} of {case.engine} on {case.place}", case.message)


def _command(level: str, title: str, text: str) -> str:
    return f"::{level} title={_escaped(title, IN_PROPERTIES)}::{_escaped(text, ESCAPES)}"


def _escaped(text: str, escapes: Mapping[str, str]) -> str:
    return text.translate({ord(letter): code for letter, code in escapes.items()})
