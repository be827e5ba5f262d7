"""docs/field.md: its figures come from the files, and what did not run has no score."""

from __future__ import annotations

import pytest
from field.__main__ import current_page
from field.page import PAGE, text
from field.result import Result, State, judged

WRONG = Result(
    row="packing",
    case="a",
    framework="verl",
    version="1",
    state=State.WRONG,
    error=0.5,
    limit=0.1,
    unit="nats",
)
NOT_RUN = Result(
    row="packing", case="a", framework="trl", version="2", state=State.NOT_RUN, reason="has no critic"
)


def test_page_shows_committed_results() -> None:
    assert current_page() == PAGE.read_text()


def test_missing_results_are_no_scores() -> None:
    page = text([WRONG, NOT_RUN], {"packing": "What is measured."})
    assert "| [packing](#packing) | **wrong** 0.5 nats (a) | not run | not run | not run | not run |" in page
    assert "| trl 2 | a | not run | - | - | has no critic |" in page


def test_only_judged_results_have_limits() -> None:
    with pytest.raises(ValueError, match="is 'not run' with the limit"):
        Result(row="packing", case="a", framework="trl", version="2", state=State.NOT_RUN, limit=0.1)


def test_nan_is_wrong() -> None:
    assert judged(float("nan"), 1.0) is State.WRONG
