"""Metrics in Trackio: calls of its public functions, and one run however often it resumes."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from core_rl.errors import ConfigError
from core_rl_trainer.logs.config import TrackioSection
from core_rl_trainer.logs.metrics_log import MetricsLog
from core_rl_trainer.logs.trackio_log import TrackioBoard, require_trackio

SECTION = TrackioSection(project="tests", group="a")


class Trackio(ModuleType):
    """The functions of Trackio 0.43 that a board calls, with their parameters."""

    def __init__(self) -> None:
        super().__init__("trackio")
        self.runs: list[dict[str, Any]] = []
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    def init(
        self,
        project: str,
        name: str | None = None,
        group: str | None = None,
        space_id: str | None = None,
        config: dict[str, Any] | None = None,
        resume: str = "never",
        embed: bool = True,
    ) -> None:
        sys.stdout.write("* Trackio project initialized\n")
        self.runs.append(
            {"project": project, "name": name, "group": group, "resume": resume, "config": config}
        )

    def log(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, metrics))

    def finish(self) -> None:
        sys.stdout.write("* Run finished\n")


@pytest.fixture
def trackio(monkeypatch: pytest.MonkeyPatch) -> Trackio:
    module = Trackio()
    monkeypatch.setitem(sys.modules, "trackio", module)
    return module


def test_rows_of_a_resumed_run_are_one_run(
    trackio: Trackio, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for done, steps in ((-1, (0, 1)), (0, (1, 2))):
        board = TrackioBoard(SECTION, tmp_path, {"seed": 3})
        with closing(MetricsLog(tmp_path, done, [board])) as log:
            for step in steps:
                log.write(step, {"reward": step / 7, "kl": float("nan")})
    first, second = trackio.runs
    assert first == second and first["resume"] == "allow" and first["config"] == {"seed": 3}
    assert str(first["name"]).startswith(f"{tmp_path.name}-")
    assert trackio.rows == [(step, {"reward": step / 7}) for step in (0, 1, 1, 2)]
    assert capsys.readouterr().out == ""  # which is for the result as JSON


def test_trackio_must_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    require_trackio(None)
    with pytest.raises(ConfigError, match="not installed: pip install trackio, or remove the section"):
        require_trackio(SECTION)
