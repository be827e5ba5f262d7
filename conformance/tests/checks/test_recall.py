"""The page of shipped bugs names existing mutants, and gives a reason for each miss."""

from __future__ import annotations

from recall import BUGS, load_bugs, page


def test_recall_page_is_current() -> None:
    command = "python conformance/tests/recall.py docs/recall.md"
    assert BUGS.with_suffix(".md").read_text(encoding="utf-8") == page(load_bugs()), f"run: {command}"


def test_bugs_are_killed_or_missed_with_reason() -> None:
    bugs = load_bugs()
    assert [bug.source for bug in bugs if bool(bug.kills) == bool(bug.miss)] == []
    assert len({bug.source for bug in bugs}) == len(bugs)
