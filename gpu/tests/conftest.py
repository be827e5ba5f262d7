"""Points as tests: rehearsed on the CPU at tiny sizes, and with ``--gpu`` run on the GPU, as ``nox -s gpu`` does."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from gpu_points import PROPERTY, Outcome, Setting, run_point, write_report


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gpu", "core-rl: points that need a GPU")
    group.addoption("--gpu", action="store_true", help="run them on the GPU; by default tiny on the CPU")
    group.addoption(
        "--gpu-report", metavar="DIR", type=Path, help="write gpu-report.json, a page and logs here"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("gpu_report", None) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Reporter(config), "core_rl_gpu_report")


@pytest.fixture
def setting(request: pytest.FixtureRequest, tmp_path: Path) -> Setting:
    return Setting(device="cuda" if request.config.getoption("gpu", False) else "cpu", directory=tmp_path)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a point in a process of its own; other tests as pytest does."""
    marker = pyfuncitem.get_closest_marker("gpu")
    if marker is None:
        return None
    setting: Setting = pyfuncitem.funcargs["setting"]
    name = pyfuncitem.name.removeprefix("test_").replace("_", "-")
    if setting.device == "cuda" and not torch.cuda.is_available():
        outcome = Outcome(
            status="not run", message="torch sees no GPU; without --gpu all points run on the CPU"
        )
    else:
        directory = pyfuncitem.config.getoption("gpu_report", None) or setting.directory
        outcome = run_point(pyfuncitem.function, setting.device, marker.kwargs["limit_s"], directory / name)
    about = pyfuncitem.function.__doc__.splitlines()[0]
    pyfuncitem.user_properties.append((PROPERTY, {"name": name, "about": about, **asdict(outcome)}))
    if outcome.status == "not run":
        pytest.skip(outcome.message)
    if outcome.status == "failed":
        pytest.fail(outcome.message, pytrace=False)
    return True


class _Reporter:
    """Writes the report of a session's points."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._points: list[dict[str, object]] = []
        self._page: Path | None = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            points = (dict(value) for name, value in report.user_properties if name == PROPERTY)
            self._points += [point | {"seconds": round(report.duration, 1)} for point in points]

    def pytest_sessionfinish(self) -> None:
        directory, rehearsal = self._config.getoption("gpu_report"), not self._config.getoption("gpu")
        if not self._config.option.collectonly:
            self._page = write_report(directory, self._points, rehearsal=rehearsal)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._page is not None:
            terminalreporter.write_line(f"report: {self._page}")
