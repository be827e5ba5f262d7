"""The matrix of versions: its floors, its page, and environments that a machine lacks."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import versions
from version_matrix import MATRIX

ROOT = Path(__file__).parents[2]


def test_page_shows_committed_reports() -> None:
    assert versions.page(versions.committed_reports()) == versions.PAGE.read_text()


def test_lowest_versions_are_those_of_the_metadata() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = [*project["dependencies"], *project["optional-dependencies"]["peft"]]
    floors = dict(requirement.partition(",")[0].split(">=") for requirement in requirements)
    pins = MATRIX["lowest"].pins
    for package in pins.keys() & floors.keys():
        assert pins[package].startswith(floors[package]), package


def test_megatron_versions_are_those_of_the_metadata() -> None:
    text = (ROOT / "plugins" / "megatron" / "pyproject.toml").read_text()
    assert '"megatron-core>=0.16.1,<0.20"' in text
    pins = {environment.pins.get("megatron-core", "0.19") for environment in MATRIX.values()}
    assert {pin[:4] for pin in pins} == {"0.16", "0.17", "0.18", "0.19"}


def test_environments_with_an_obstacle_have_no_report() -> None:
    reports = versions.committed_reports()
    assert not [name for name in reports if MATRIX[name].obstacle]


def test_missing_environment_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(versions, "ENVIRONMENTS", tmp_path)
    monkeypatch.setattr(versions, "PAGE", tmp_path / "support.md")
    versions.main(["torch-2.14"])
    assert "torch-2.14: not run, since it is not installed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["megatron-0.15"], "no such environment: megatron-0.15"),
        (["--install"], "takes the names of environments"),
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str], says: str) -> None:
    with pytest.raises(SystemExit, match=says):
        versions.main(arguments)
