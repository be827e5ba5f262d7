"""The search for a version, and a break that is planted in an engine of wheels."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from core_rl.cli import build_app
from core_rl.errors import ConfigError
from core_rl_conformance.versions.bisect import Trial, Verdict, bisect, engine_of, span, versions_between

GOOD, BAD, BROKEN, UNTRIED = Verdict.GOOD, Verdict.BAD, Verdict.BROKEN, Verdict.UNTRIED


@given(st.integers(1, 40), st.integers(1, 40), st.sets(st.integers(1, 79)))
def test_neighbours_of_the_change_are_named(good: int, bad: int, gaps: set[int]) -> None:
    verdicts = [GOOD] * good + [BAD] * bad
    tried: list[str] = []

    def attempt(version: str) -> Trial:
        tried.append(version)
        index = int(version)
        inner = 0 < index < len(verdicts) - 1
        verdict = UNTRIED if inner and index in gaps else verdicts[index]
        return Trial(version=version, verdict=verdict, reason="")

    result = bisect([str(number) for number in range(good + bad)], attempt)
    low, high = int(result.good.version), int(result.bad.version)
    assert low < good <= high
    assert set(map(int, result.between)) == set(range(low + 1, high)) <= gaps
    assert len(tried) == len(set(tried)) <= 9 + len(gaps)


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        ({"1": GOOD, "2": BROKEN, "3": BAD}, ("1", "3", ("2",))),
        ({"1": GOOD, "2": BROKEN, "3": BROKEN}, ("1", "2", ())),
        ({"1": GOOD, "2": BAD, "3": BROKEN}, ("1", "2", ())),
    ],
)
def test_broken_versions_count_where_the_last_is(
    verdicts: Mapping[str, Verdict], expected: tuple[str, str, tuple[str, ...]]
) -> None:
    result = bisect(
        list(verdicts), lambda version: Trial(version=version, verdict=verdicts[version], reason="")
    )
    assert (result.good.version, result.bad.version, result.between) == expected


@pytest.mark.parametrize("ends", [(BAD, BAD), (GOOD, GOOD), (BROKEN, BAD), (GOOD, UNTRIED), (UNTRIED, BAD)])
def test_wrong_ends_are_refused(ends: tuple[Verdict, Verdict]) -> None:
    with pytest.raises(ConfigError, match=r"^--(good|bad) [12] is (good|bad|broken|untried)"):
        bisect(
            ["1", "2"], lambda version: Trial(version=version, verdict=ends[int(version) - 1], reason="why")
        )


@pytest.mark.parametrize(
    ("good", "bad"),
    [("torch", "torch==2.13"), ("torch>=2", "torch==2.13"), ("torch==2.*", "torch==3"), ("a==1", "b==2")],
)
def test_ends_name_one_version_of_one_package(good: str, bad: str) -> None:
    with pytest.raises(ConfigError, match="--good"):
        span(good, bad)


def test_engine_follows_from_its_requirement() -> None:
    assert engine_of("Megatron_Core") == "megatron"
    with pytest.raises(ConfigError, match="fsdp.* requires torch; name one engine with --engine"):
        engine_of("torch")
    with pytest.raises(ConfigError, match="no installed engine requires absent"):
        engine_of("absent")


SPEC = """
from core_rl.registry.spec import EngineSpec
from dataclasses import replace
from core_rl.reference import SPEC as REFERENCE
SPEC = replace(REFERENCE, name="planted", factory="planted.backend:Planted", packages=())
"""
BACKEND = """
from core_rl.reference.train import ReferenceBackend
class Planted(ReferenceBackend):
    def sequence(self, ids, step):
        return {{name: value + {error} for name, value in super().sequence(ids, step).items()}}
"""


def _wheel(directory: Path, version: str, error: float) -> None:
    """A wheel of the engine ``planted`` whose outputs are too large by ``error``."""
    metadata = f"planted-{version}.dist-info"
    files = {
        "planted/__init__.py": SPEC,
        "planted/backend.py": BACKEND.format(error=error),
        f"{metadata}/METADATA": f"Metadata-Version: 2.1\nName: planted\nVersion: {version}\n",
        f"{metadata}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{metadata}/entry_points.txt": "[rl_engines]\nplanted = planted:SPEC\n",
    }
    files[f"{metadata}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{metadata}/RECORD"])
    with zipfile.ZipFile(directory / f"planted-{version}-py3-none-any.whl", "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four releases and a pre-release of ``planted``, of which 1.2 and later are wrong."""
    for version, error in {"1.0": 0, "1.1": 0, "1.2rc1": 0, "1.2": 1e-2, "1.3": 1e-2}.items():
        _wheel(tmp_path, version, error)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    return tmp_path


@pytest.mark.parametrize(
    ("good", "bad", "versions"),
    [
        ("1.0", "1.3", ["1.0", "1.1", "1.2", "1.3"]),
        ("1.3", "1.1", ["1.3", "1.2", "1.1"]),
        ("1.1", "1.2rc1", ["1.1", "1.2rc1"]),
        ("1.0", "1.4", ["1.0", "1.1", "1.2", "1.3", "1.4"]),
    ],
)
@pytest.mark.usefixtures("index")
def test_releases_between_the_ends_are_searched(good: str, bad: str, versions: list[str]) -> None:
    assert versions_between("planted", good, bad) == versions


@pytest.mark.usefixtures("index")
def test_unknown_package_is_refused() -> None:
    with pytest.raises(ConfigError, match="pip knows no version of 'absent'"):
        versions_between("absent", "1", "2")


@pytest.mark.nightly
@pytest.mark.usefixtures("index")
def test_planted_break_is_traced_to_its_version(tmp_path: Path) -> None:
    command = [
        "bisect",
        "--check=I7.logprobs",
        "--engine=planted",
        f"--directory={tmp_path / 'environments'}",
    ]
    result = CliRunner().invoke(build_app(), [*command, "--good=planted==1.0", "--bad=planted==1.3"])
    assert result.exit_code == 0, result.output
    assert "I7.logprobs passes with planted 1.1 (1 cases, largest error" in result.output
    assert "I7.logprobs fails with planted 1.2 (I7.logprobs on dp1-" in result.output
