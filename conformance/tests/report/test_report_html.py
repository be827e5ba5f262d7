"""The HTML page: complete, self-contained, and escaped; and the geometry of its plots."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser

import pytest
from page_policy import blocked_sources
from report_support import EVERYTHING, FAILED, case, measured, report

from core_rl_conformance.report.html import error_plot, report_page, scatter_plots

VOID = {"meta", "rect", "line", "circle", "br"}


class _Page(HTMLParser):
    """Gathers text, and checks that elements are closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.links: list[str] = []
        self.ids: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID or tag == "circle":
            self.open.append(tag)
        self.text += " "
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]
        self.ids += [value or "" for name, value in attrs if name == "id"]

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID or tag == "circle":
            assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text += data


@pytest.fixture(scope="module")
def page() -> str:
    return report_page(EVERYTHING)


def test_the_page_says_everything(page: str) -> None:
    text = " ".join(_Page(page).text.split())
    for part in (
        "mine, other failed",
        "2 passed 1 failed 1 waived",
        "I10.value: engine 'mine' values differ by <inf> & more",
        "undeclared: value_head",
        "waived: mine#3 (owner: ann)",
        "✗ not certified I10.value failed",
        "The log-prob of every token is the oracle's, at T.",
        "Look at: the <head>.",
        "import torch # nothing <else>",
        "a processor, 2 cores",
        "torch 2.13.0",
        "pytest --engine=mine --pyargs core_rl_conformance",
        "An engine & a half",
        "dp1-qwen3-float32",
    ):
        assert part in text, part


def test_page_is_well_formed_and_standalone(page: str) -> None:
    parsed = _Page(page)
    assert parsed.open == []
    assert all(link.startswith("#") and link[1:] in parsed.ids for link in parsed.links)
    assert not re.search(r"<script|url\(|@import|https?:", page)
    assert blocked_sources(page) == []


def test_engine_text_is_escaped() -> None:
    evil = "<img src=x onerror=alert(1)>"
    page = report_page(report(case(message=evil, reason=evil, outcome=FAILED.outcome), problems=(evil,)))
    assert "<img" not in page and page.count("&lt;img") >= 2


def test_a_report_without_results_has_a_page() -> None:
    assert "not run" in _Page(report_page(report())).text


def test_dots_show_the_side_of_limit() -> None:
    ratios = [0.0, 1e-9, 0.01, 1.0, 1.5, 1e9, math.inf, math.nan]
    cases = [case(seed=number, measurements=(measured(ratio, 1.0),)) for number, ratio in enumerate(ratios)]
    plot = error_plot(report(*cases))
    (dots,) = plot.rows.values()
    places = [dot.x for dot in dots]
    assert (
        places == sorted(places) and places[0] < places[1] < places[2] < places[3] == plot.limit < places[4]
    )
    assert places[5] == places[6] and all(0 <= place <= 100 for place in places)
    assert [dot.failed for dot in dots] == [False] * 4 + [True] * 4


def test_case_dot_shows_worst_measurement() -> None:
    plot = error_plot(EVERYTHING)
    assert {check: len(dots) for check, dots in plot.rows.items()} == {"I2.logprobs": 2, "I10.value": 2}
    worst = next(dot for dots in plot.rows.values() for dot in dots if dot.failed)
    assert "mine dp1-qwen3-float32: failed; logprobs: error inf" in worst.label


def test_failed_exact_comparison_exceeds_limit() -> None:
    (dots,) = error_plot(report(case(measurements=(measured(1e-9, 0.0),)))).rows.values()
    assert dots[0].failed


def test_points_of_comparison_share_plot() -> None:
    (scatter,) = scatter_plots(EVERYTHING)
    assert scatter.title == "mine, I2.logprobs: logprobs"
    area = scatter.values.area
    upper, lower = scatter.values.dots
    assert (upper.x, upper.y) == (area.right, area.top) and lower.y == area.bottom
    # The engine is below the oracle by 0 and by -1e-6: in the middle, and up.
    assert [dot.y for dot in scatter.differences.dots] == [area.y(0.5), area.y(0.95)]
    assert [tick.label for tick in scatter.values.x_ticks] == ["-2.5", "-1.75", "-1"]
    assert [tick.label for tick in scatter.differences.y_ticks] == ["-1.0e-06", "0", "+1.0e-06"]


def test_engine_plots_mark_wrong_points() -> None:
    points = ((-1.0, -1.0), (-2.0, -2.5))
    cases = [case(engine=name, measurements=(measured(0.5, points=points),)) for name in ("mine", "other")]
    scatters = scatter_plots(report(*cases))
    assert [scatter.title.partition(",")[0] for scatter in scatters] == ["mine", "other"]
    assert [[dot.failed for dot in scatter.values.dots] for scatter in scatters] == [[False, True]] * 2
    assert report_page(report(*cases)).count('class="spot bad"') == 4


def test_plots_have_titles_and_named_axes(page: str) -> None:
    text = " ".join(_Page(page).text.split())
    assert "mine, I2.logprobs: logprobs" in text
    assert "logprobs, engine ↑" in text and "oracle ↑" in text and "logprobs, oracle →" in text
    assert page.count('role="img" aria-label="mine, I2.logprobs') == 2


def test_points_are_thinned_without_nonfinite() -> None:
    points = tuple((float(number), float(number)) for number in range(10_000))
    (scatter,) = scatter_plots(report(case(measurements=(measured(0.0, points=((math.nan, 1.0), *points)),))))
    assert 200 <= len(scatter.values.dots) <= 400
    assert scatter.values.x_ticks[-1].label == "1e+04"
