"""The nightly parts: what is run again after which commit, in which directory, and what is recorded."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from nightly import PARTS, Nightly, Part

ROOT = Path(__file__).parents[2]
SCRIPT = "import pathlib, sys; exec(pathlib.Path(sys.argv[1]).read_text())"
"""Stands for nox: runs the file that the session names."""
PART = Part("code/part.py", ("SEED",), ("code",), 20.0)
Run = Callable[..., list[str]]


def git(directory: Path, *arguments: str) -> None:
    who = ("-c", "user.name=tests", "-c", "user.email=tests@localhost")
    subprocess.run(["git", *who, *arguments], cwd=directory, check=True, capture_output=True)


def commit(repository: Path, path: str, text: str) -> None:
    file = repository / path
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    git(repository, "add", ".")
    git(repository, "commit", "-m", f"Write {path}")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with code, whose part appends the working directory to a file, and docs."""
    directory = tmp_path / "repository"
    directory.mkdir()
    git(directory, "init")
    commit(directory, ".gitignore", ".nox/\n")
    commit(
        directory,
        "code/part.py",
        f"open({str(tmp_path / 'runs')!r}, 'a').write(str(pathlib.Path.cwd()) + '\\n')",
    )
    commit(directory, "docs/page.md", "first")
    return directory


@pytest.fixture
def run(repository: Path) -> Run:
    """Run parts by name; `PART` by default."""

    def run(part: Part = PART, *names: str) -> list[str]:
        lines: list[str] = []
        return Nightly(repository, {"part": part}, [sys.executable, "-c", SCRIPT], lines.append).run(names)

    return run


def runs(repository: Path) -> list[str]:
    file = repository.parent / "runs"
    return file.read_text().splitlines() if file.exists() else []


def test_part_runs_in_a_worktree_and_is_recorded(repository: Path, run: Run) -> None:
    (repository / "code" / "part.py").write_text("raise SystemExit('an edit that is not committed')")
    assert run() == []
    assert runs(repository) == [str(repository / ".nox" / "nightly")]
    record = json.loads((repository / ".nox" / "nightly.json").read_text())
    assert set(record["part"]) == {"key", "commit", "seed", "minutes"}


def test_commit_elsewhere_voids_nothing(repository: Path, run: Run) -> None:
    run()
    commit(repository, "docs/page.md", "second")
    assert run() == [] and len(runs(repository)) == 1


@pytest.mark.parametrize("changed", ["code", "arguments"])
def test_change_of_a_part_runs_it_again(repository: Path, run: Run, changed: str) -> None:
    run()
    if changed == "code":
        commit(repository, "code/more.py", "")
    run(PART if changed == "code" else replace(PART, arguments=("SEED", "more")))
    assert len(runs(repository)) == 2


def test_linked_worktrees_share_the_record(repository: Path, run: Run, tmp_path: Path) -> None:
    run()
    git(repository, "worktree", "add", "-b", "other", str(tmp_path / "linked"))
    assert Nightly(tmp_path / "linked", {"part": PART}, ["false"]).run([]) == []


@pytest.mark.parametrize(
    "text", ["raise SystemExit(3)", "import time; time.sleep(60)"], ids=["fails", "hangs"]
)
def test_failure_is_named_and_not_recorded(repository: Path, run: Run, text: str) -> None:
    commit(repository, "code/part.py", text)
    assert run(replace(PART, limit_s=1.0)) == ["part"]
    assert not (repository / ".nox" / "nightly.json").exists()


def test_second_nightly_is_refused(repository: Path, run: Run) -> None:
    run()
    with (repository / ".nox" / "nightly.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(SystemExit, match="another nightly runs"):
            run()


def test_unknown_part_is_refused(run: Run) -> None:
    with pytest.raises(SystemExit, match=r"no such part: fsdq; there are part"):
        run(PART, "fsdq")


@pytest.mark.parametrize("name", PARTS)
def test_paths_of_each_part_exist(name: str) -> None:
    assert len(Nightly(ROOT).key(name)) == 64
    assert PARTS[name].limit_s <= 30 * 60
