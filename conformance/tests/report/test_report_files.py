"""Reading and writing report files, damaged ones included."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from report_support import EVERYTHING

from core_rl_conformance.report.files import (
    ReportError,
    check_destination,
    read_report,
    read_reports,
    report_text,
    write_report,
    write_text,
)

TEXT = report_text(EVERYTHING, indent=None)


def _changed(change: Callable[[dict[str, Any]], object]) -> bytes:
    values = json.loads(TEXT)
    change(values)
    return json.dumps(values).encode()


BAD = [
    (b"", "no JSON at line 1, column 1"),
    (TEXT.encode()[:500], "is damaged or no report: no JSON at line 1"),
    (b"\xff" + TEXT.encode(), "byte 0 is not UTF-8"),
    (b"[1, 2]", "is no conformance report: it has no field 'schema_version'"),
    (b"{}", "is no conformance report: it has no field 'schema_version'"),
    (
        _changed(lambda r: r.update(schema_version="2.0", suite_version="9.1")),
        "the schema version '2.0'.*9.1",
    ),
    (_changed(lambda r: r.update(schema_version=["1.0"])), "the schema version"),
    (_changed(lambda r: r.pop("engines")), "is damaged.*: engines: Field required"),
    (_changed(lambda r: r["results"][0].pop("seconds")), "results.0.seconds: Field required"),
    (
        _changed(lambda r: r["results"][0].update(outcome="perhaps")),
        "results.0.outcome: Input should be 'passed'",
    ),
    (_changed(lambda r: r["results"][0].update(engine="fsdp")), "results name the engine 'fsdp'"),
    (_changed(lambda r: r["results"][0].update(check="I2.logprops")), "results name the check 'I2.logprops'"),
    (_changed(lambda r: r["results"][0].update(seconds=0.25)), "was changed after it was written"),
    (_changed(lambda r: r.pop("digest")), "was changed after it was written: its digest is ''"),
    (_changed(lambda r: r.update(surprise=1)), "surprise: Extra inputs are not permitted"),
    (_changed(lambda r: r.update(results=[{}] * 3)), r"27 problems.*and 22 more"),
]


@pytest.mark.parametrize(("content", "message"), BAD)
def test_damaged_file_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "mine.json"
    path.write_bytes(content)
    with pytest.raises(ReportError, match=f"(?s)mine.json.*{message}"):
        read_report(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"none.json cannot be read: No such file"):
        read_report(tmp_path / "none.json")


def test_all_unreadable_files_are_named_at_once(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{", encoding="utf-8")
    with pytest.raises(ReportError, match=r"(?s)2 problems.*bad.json.*none.json"):
        read_reports([tmp_path / "bad.json", tmp_path / "none.json"])


def test_report_round_trip_writes_page(tmp_path: Path) -> None:
    path = tmp_path / "new" / "mine.json"
    page = write_report(EVERYTHING, path)
    assert read_report(path).model_copy(update={"digest": ""}) == EVERYTHING
    assert page == path.with_suffix(".html") and "</html>" in page.read_text(encoding="utf-8")
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["mine.html", "mine.json"]


def test_bad_destinations_are_refused_before_the_session(tmp_path: Path) -> None:
    check_destination(tmp_path / "new" / "mine.json")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "file").touch()
    for name in ("mine.xml", "mine", "folder.json", "file/mine.json"):
        with pytest.raises(ReportError, match=f"--report=.*{name}: "):
            check_destination(tmp_path / name)


def test_failed_write_keeps_previous_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text("old", encoding="utf-8")
    (tmp_path / "mine.json.partial").mkdir()
    with pytest.raises(ReportError, match=r"mine.json cannot be written: Is a directory"):
        write_text(path, "new")
    assert path.read_text(encoding="utf-8") == "old"
