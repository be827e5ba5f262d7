"""Options of the tests of the suite: with how many seeds the zoo is run, and the kill matrix that comes of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from kill_matrix import Kill, KillMatrix


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("mutants", "core-rl: the mutants of the conformance suite")
    group.addoption(
        "--seeds",
        type=int,
        metavar="N",
        help="run mutants and correct engines with N seeds, and print the kill matrix",
    )
    group.addoption(
        "--first-seed", type=int, default=0, metavar="S", help="the first of the seeds; default: %(default)s"
    )
    group.addoption(
        "--full",
        action="store_true",
        help="run every mutant through every check that fits it, and print which of them kill it (slow)",
    )
    group.addoption("--kill-matrix", metavar="FILE", help="write the kill matrix as Markdown to FILE")


def pytest_configure(config: pytest.Config) -> None:
    requested = (config.option.seeds, config.option.full, config.option.kill_matrix)
    if any(value not in (None, False) for value in requested) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Collector(config), "core_rl_kill_matrix")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without ``--full`` there is nothing for the tests that fill the whole matrix."""
    if not config.option.full:
        items[:] = [item for item in items if "suspect" not in getattr(item, "fixturenames", ())]


class _Collector:
    """Gathers reports of the zoo's tests, in this process or in workers."""

    def __init__(self, config: pytest.Config) -> None:
        self.matrix = KillMatrix()
        self.file: str | None = config.option.kill_matrix

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            for kill in Kill.from_properties(report.user_properties):
                self.matrix.add(kill)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.write_sep("=", "kill matrix")
        terminalreporter.write(self.matrix.text())
        if self.file is not None:
            Path(self.file).write_text(self.matrix.markdown(), encoding="utf-8")
