"""Reading and writing report files."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from core_rl.errors import CoreRLError, raise_all
from core_rl_conformance.report.model import Report

READABLE = get_args(Report.model_fields["schema_version"].annotation)
"""Versions of the schema that this core-rl reads."""
SHOWN_PROBLEMS = 5


class ReportError(CoreRLError):
    """A report file that cannot be written or read."""


def read_report(path: Path) -> Report:
    """The report in ``path``.

    Raises `ReportError`, with the file and the reason, for a file that is missing, damaged, of another
    schema version, or no report at all.
    """
    values = _read_json(path)
    version = values.get("schema_version") if isinstance(values, dict) else None
    if version is None:
        raise ReportError(f"{path} is no conformance report: it has no field 'schema_version'")
    if version not in READABLE:
        suite = values.get("suite_version", "an unknown version")
        raise ReportError(
            f"{path} has the schema version {version!r}, and this core-rl reads {' and '.join(READABLE)}; "
            f"use the core-rl that wrote it ({suite}), or run the suite again"
        )
    try:
        report = Report.model_validate(values)
    except ValidationError as error:
        problems = (_problem(detail["loc"], detail["msg"]) for detail in error.errors())
        raise_all(ReportError, f"{path} is damaged; run the suite again", problems, most=SHOWN_PROBLEMS)
        raise
    if report.digest != _digest(values):
        raise ReportError(
            f"{path} was changed after it was written: its digest is {report.digest!r}; run the suite again"
        )
    return report


def read_reports(paths: Sequence[Path]) -> list[Report]:
    """All of them. Raises one `ReportError` that names every file that cannot be read."""
    reports, problems = [], []
    for path in paths:
        try:
            reports.append(read_report(path))
        except ReportError as error:
            problems.append(str(error))
    raise_all(ReportError, "conformance reports", problems)
    return reports


def _read_json(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ReportError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ReportError(f"{path} is damaged or no report: byte {error.start} is not UTF-8") from error
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ReportError(f"{path} is damaged or no report: no JSON at {where}: {error.msg}") from error


def _problem(location: tuple[int | str, ...], message: str) -> str:
    where = ".".join(map(str, location)) or "the whole report"
    return f"{where}: {message.removeprefix('Value error, ')}"


def check_destination(path: Path) -> None:
    """Raise `ReportError` unless a report can be written to ``path``; better now than after the session."""
    if path.suffix != ".json":
        raise ReportError(f"--report={path}: the name must end in .json; the HTML page goes next to it")
    parent = next(parent for parent in path.absolute().parents if parent.exists())
    if path.is_dir() or not parent.is_dir() or not os.access(parent, os.W_OK):
        raise ReportError(f"--report={path}: no file can be written there")


def write_report(report: Report, path: Path) -> Path:
    """Write ``report`` to ``path`` and an HTML page next to it; returns the page's path. Raises `ReportError`."""
    from core_rl_conformance.report.html import report_page  # imports jinja2

    page = path.with_suffix(".html")
    write_text(path, report_text(report))
    write_text(page, report_page(report))
    return page


def report_text(report: Report, indent: int | None = 1) -> str:
    """The contents of the file of ``report``, with the digest of the rest."""
    values = report.model_dump(mode="json")
    return json.dumps(values | {"digest": _digest(values)}, indent=indent) + "\n"


def _digest(values: dict[str, Any]) -> str:
    signed = {name: value for name, value in values.items() if name != "digest"}
    text = json.dumps(signed, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def write_text(path: Path, text: str) -> None:
    """Replace ``path`` in one go, so that a reader never sees a half. Raises `ReportError`."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise ReportError(f"{path} cannot be written: {error.strerror}") from error
