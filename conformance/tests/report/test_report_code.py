"""The code that a report identifies: imported files, whatever installed them, and their commit."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from distributions import write_distribution

from core_rl.reference import SPEC
from core_rl.registry.spec import PROTOCOL_VERSION, EngineSpec
from core_rl_conformance.report.code import engine_code, suite_code
from core_rl_conformance.report.model import CodeRecord


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source tree on the path, with the package of an engine and another package of its distribution."""
    for package in ("coded_engine", "coded_kernels"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("A = 1\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def _code(distribution: str = "(this process)") -> CodeRecord:
    spec = EngineSpec(
        name="coded",
        kind="train",
        protocol=PROTOCOL_VERSION,
        factory="coded_engine.backend:Backend",
        config="coded_engine:Config",
    )
    return engine_code(spec, distribution)


def test_changed_source_changes_digest(tree: Path) -> None:
    before = _code()
    (tree / "coded_engine" / "notes.txt").write_text("not code", encoding="utf-8")
    assert _code() == before
    (tree / "coded_engine" / "backend.py").write_text("B = 2\n", encoding="utf-8")
    assert _code().digest != before.digest


def test_editable_and_wheel_digests_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tree: Path
) -> None:
    editable, wheel = tmp_path / "editable", tmp_path / "wheel"
    (tree / "tests").mkdir()
    (tree / "tests" / "test_it.py").write_text("", encoding="utf-8")
    source = tmp_path / "source"
    source.mkdir()
    for package in ("coded_engine", "coded_kernels", "tests"):
        shutil.move(tree / package, source / package)
    write_distribution(editable, "coded", files={"_coded.pth": f"{source}\n"})
    files = {f"{name}/__init__.py": "A = 1\n" for name in ("coded_engine", "coded_kernels")}
    write_distribution(wheel, "coded", files=files)
    digests = []
    for site in ([str(editable), str(source)], [str(wheel)]):
        with monkeypatch.context() as context:
            context.setattr(sys, "path", [*site, *sys.path])
            digests.append(_code("coded").digest)
    assert digests[0] == digests[1]
    (source / "coded_kernels" / "__init__.py").write_text("A = 2\n", encoding="utf-8")
    monkeypatch.setattr(sys, "path", [str(editable), str(source), *sys.path])
    assert _code("coded").digest != digests[0]


def test_commit_only_of_tracked_files(tree: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=ann", "-c", "user.email=ann@example.org"]
        subprocess.run(["git", "-C", str(tree), *identity, *arguments], check=True, capture_output=True)

    git("init")
    git("commit", "--allow-empty", "-m", "Begin")
    assert _code().commit == ""
    git("add", "coded_engine")
    git("commit", "-m", "Add an engine")
    commit = _code().commit
    assert len(commit) == 40
    (tree / "coded_engine" / "__init__.py").write_text("A = 3\n", encoding="utf-8")
    assert _code().commit == f"{commit}-dirty"


def test_suite_and_reference_share_code() -> None:
    assert engine_code(SPEC, "no-such-distribution").digest != suite_code().digest
    assert suite_code() == suite_code()
