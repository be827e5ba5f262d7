"""``core-rl new-engine``: it writes a working engine, and overwrites nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from cli_support import run_command
from distributions import install_project

from core_rl import __version__
from core_rl.errors import ConfigError
from core_rl.registry.spec import PROTOCOL_VERSION, EngineKind
from core_rl_conformance.skeleton import EXAMPLES, Skeleton, write_skeleton


def _path_with(project: Path, site: Path) -> str:
    """``PYTHONPATH`` with the new engine, installed in ``site``."""
    return os.pathsep.join([*install_project(project, site), os.environ.get("PYTHONPATH", "")])


def test_the_new_engine_is_listed_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("new-engine", "odd-2b", "--directory", str(tmp_path)) == 0
    project = tmp_path / "core-rl-odd-2b"
    printed = capsys.readouterr().out
    assert f"wrote {project / 'src' / 'core_rl_odd_2b' / 'engine.py'}" in printed
    assert "pytest --engine=odd-2b --pyargs core_rl_conformance --quick" in printed
    environment = {**os.environ, "PYTHONPATH": _path_with(project, tmp_path / "site")}
    for arguments in (["engines", "--json"], ["engines", "show", "odd-2b", "--json"]):
        command = [sys.executable, "-m", "core_rl.cli", *arguments]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        listed = json.loads(result.stdout)
        if "engines" in listed:
            (entry,) = [entry for entry in listed["engines"] if entry["name"] == "odd-2b"]
            assert (entry["status"], entry["distribution"]) == ("ok", "core-rl-odd-2b")
        else:
            assert listed["factory"] == "core_rl_odd_2b.engine:Odd2bBackend"
            assert "options.bucket_bytes" in [field["name"] for field in listed["fields"]]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "summary"), [("train", "1 passed, 1 deselected"), ("inference", "1 passed")]
)
def test_the_new_engines_own_tests_pass(tmp_path: Path, kind: EngineKind, summary: str) -> None:
    """The whole suite among them is left to the example, which equals the command's output."""
    project = tmp_path / "project"
    write_skeleton(Skeleton.named("fresh", kind=kind), project)
    environment = {**os.environ, "PYTHONPATH": _path_with(project, tmp_path / "site"), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            "-W",
            "error::pytest.PytestUnknownMarkWarning",
            "-k",
            "not conformance_suite",
        ],
        cwd=project,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert result.returncode == 0 and summary in result.stdout, result.stdout + result.stderr


@pytest.mark.parametrize("kind", EXAMPLES)
def test_it_asks_for_this_core_and_its_protocol(kind: EngineKind) -> None:
    files = Skeleton.named("mine", kind=kind).files()
    project = tomllib.loads(files["pyproject.toml"])["project"]
    major, minor = __version__.split(".")[:2]
    extra = "[servers]" if kind == "inference" else ""
    assert project["dependencies"] == [f"core-rl{extra}>={major}.{minor},<{major}.{int(minor) + 1}"]
    assert f"protocol={PROTOCOL_VERSION}" in files["src/core_rl_mine/__init__.py"]


@pytest.mark.parametrize("kind", EXAMPLES)
def test_no_placeholder_is_left(kind: EngineKind) -> None:
    for path, text in Skeleton.named("my-own", kind=kind).files().items():
        assert "$" not in path + text
        assert EXAMPLES[kind][0] not in (path + text).lower()
        if path.endswith(".py"):
            compile(text, path, "exec")


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "pyproject.toml").write_text("another project", encoding="utf-8")
    arguments = ("new-engine", "mine", "--directory", str(tmp_path))
    assert run_command(*arguments) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["core-rl-mine", "pyproject.toml"]
    folder = tmp_path / "core-rl-mine"
    (folder / "src" / "core_rl_mine" / "engine.py").unlink()
    (folder / "README.md").write_text("mine", encoding="utf-8")
    assert run_command(*arguments) == 2
    assert "README.md exists" in capsys.readouterr().err
    assert (folder / "README.md").read_text(encoding="utf-8") == "mine"
    assert not (folder / "src" / "core_rl_mine" / "engine.py").exists()


def test_unwritable_directory_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written: .*choose another --directory"):
        write_skeleton(Skeleton.named("mine"), tmp_path / "file")


NAMES = [
    ("My-Engine", None, "lower-case letters"),
    ("my_engine", None, "lower-case letters"),
    ("2fast", None, "begin with a letter"),
    ("a--b", None, "single hyphens"),
    ("", None, "lower-case letters"),
    ("../up", None, "lower-case letters"),
    ("core-rl-mine", None, "'mine'"),
    ("reference", None, "core-rl .* has one of this name"),
    ("conformance", None, "the module core_rl_conformance is core-rl's own"),
    ("trainer", None, "the module core_rl_trainer is core-rl's own"),
    ("vllm", None, "core-rl-vllm .* has one of this name"),
    ("mine", "my engine", "'my engine' must be CapWords"),
]


@pytest.mark.parametrize(("name", "prefix", "message"), NAMES)
def test_invalid_engine_names_are_refused(name: str, prefix: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=f"no engine can be called '{name}': .*{message}"):
        Skeleton.named(name, prefix)


def test_class_prefix_is_cap_words() -> None:
    assert Skeleton.named("my-own-engine").class_prefix == "MyOwnEngine"
    assert Skeleton.named("mine", "MINE").class_prefix == "MINE"
