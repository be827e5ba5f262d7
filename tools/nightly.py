#!/usr/bin/env python3
"""Run the nightly parts at the last commit, in a worktree: python -m nox -s nightly [-- PART ...]

The worktree is `.nox/nightly` of the repository, with environments that each night uses again. A part that passed is
not run again while the git objects of its paths and its arguments stay the same; `.nox/nightly.json` records it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

BUILD = ("constraints", "noxfile.py", "pyproject.toml")
SUITE = (*BUILD, "core", "conformance")
CODE = (*SUITE, "trainer", "cluster", "plugins", "examples")
WORKERS = ("-n", "2")
STEALING = (*WORKERS, "--dist", "worksteal")
MUTANTS = "conformance/tests/checks/test_mutants.py"
UNUSUAL = "conformance/tests/test_unusual_engines.py::test_correct_engines_raise_no_alarm"
KINDS = ("OptimizerInHooks", "SortsByLength", "LogitsWhereTrained", "GradientsInFloat64")
ENDING_S = 30.0
"""Time for a part that is out of time to end its processes."""


@dataclass(frozen=True)
class Part:
    """A nox session with arguments, in which `SEED` stands for a number, and the paths that it depends on."""

    session: str
    arguments: tuple[str, ...] = ()
    paths: tuple[str, ...] = CODE
    limit_s: float = 30 * 60.0


def _tests(*arguments: str, paths: tuple[str, ...] = CODE) -> Part:
    return Part("pytest", (*arguments, *STEALING, "--hypothesis-seed=SEED"), paths)


def _certify(*engines: str, plugins: Sequence[str] = (), options: Sequence[str] = ()) -> Part:
    names = [f"--engine={engine}" for engine in engines]
    places = [f"plugins/{plugin}" for plugin in plugins]
    return Part("pytest", (*names, "conformance/", *WORKERS, "--seed=SEED", *options), (*SUITE, *places))


PARTS = {
    "core": _tests("core/tests"),
    "suite": _tests(
        "conformance/tests", f"--ignore={MUTANTS}", f"--deselect={UNUSUAL}", paths=(*SUITE, "docs/checks.md")
    ),
    "trainer": _tests("trainer/tests"),
    "plugins": _tests(
        "plugins", "examples", "cluster/tests", "--ignore-glob=*/server_tests", "--ignore=plugins/torchtitan"
    ),
    "mutants": _tests(MUTANTS, "--first-seed=SEED", paths=SUITE),
    **{
        f"unusual-{kind}": _tests(UNUSUAL, "-k", kind, "--seeds=20", "--first-seed=SEED", paths=SUITE)
        for kind in KINDS
    },
    "reference": _certify("reference"),
    "rollout": _certify("reference-rollout"),
    "fsdp": _certify("fsdp", plugins=["fsdp"]),
    "megatron": _certify("megatron", plugins=["megatron"]),
    "pairs": _certify("fsdp", "megatron", plugins=["fsdp", "megatron"], options=["--quick"]),
    "sglang": Part("sglang", ("--seed=SEED",), (*SUITE, "trainer", "plugins/fsdp", "plugins/sglang")),
    "vllm": Part("vllm", ("--seed=SEED",), (*SUITE, "trainer", "plugins/fsdp", "plugins/vllm")),
    "torchtitan": Part("torchtitan", ("--seed=SEED",), (*SUITE, "trainer", "plugins")),
    "cluster": Part("cluster"),
    "torchao": Part("torchao", ("--seed=SEED",)),
    "families": Part("families", (), (*BUILD, "core", "docs/model-families.md")),
    "docs": Part("docs", (), (*CODE, "docs", "mkdocs.yml", "README.md", "CONTRIBUTING.md", "changelog.d")),
    "wheels": Part("wheels", (), (*CODE, "README.md", "LICENSE", "CHANGELOG.md")),
    "gpu": Part("pytest", ("gpu/tests", "--gpu-report=gpu-report"), (*CODE, "gpu", "benchmarks")),
}


class Nightly:
    """The parts of ``repository`` at its last commit. ``nox`` begins the command of each part."""

    def __init__(
        self,
        repository: Path,
        parts: Mapping[str, Part] = PARTS,
        nox: Sequence[str] = (sys.executable, "-m", "nox", "-s"),
        log: Callable[[str], object] = lambda line: sys.stderr.write(f"nightly: {line}\n"),
    ) -> None:
        self._parts, self._nox, self._log = parts, nox, log
        self._commit = _git(repository, "rev-parse", "HEAD")
        self._root = Path(
            _git(repository, "worktree", "list", "--porcelain").splitlines()[0].split(" ", 1)[1]
        )
        self._worktree = self._root / ".nox" / "nightly"
        self._record = self._root / ".nox" / "nightly.json"

    def run(self, names: Sequence[str]) -> list[str]:
        """Run the parts ``names``, all where there are none; the names of failed parts. Raises `SystemExit`."""
        if unknown := [name for name in names if name not in self._parts]:
            raise SystemExit(f"no such part: {', '.join(unknown)}; there are {', '.join(self._parts)}")
        self._record.parent.mkdir(exist_ok=True)
        with self._record.with_suffix(".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise SystemExit(f"another nightly runs in {self._worktree}; wait for its end") from None
            self._check_out()
            return [name for name in names or self._parts if not self._passes(name)]

    def _check_out(self) -> None:
        """Bring the worktree to the commit; its ignored files, environments among them, stay."""
        if (self._worktree / ".git").exists():
            _git(self._worktree, "checkout", "--force", "--detach", self._commit)
            _git(self._worktree, "clean", "-d", "--force")
        else:
            _git(self._root, "worktree", "prune")
            _git(self._root, "worktree", "add", "--detach", str(self._worktree), self._commit)

    def _passes(self, name: str) -> bool:
        """Whether the part passes, or did so with the same files."""
        part, key = self._parts[name], self.key(name)
        before = self._passed().get(name, {})
        if before.get("key") == key:
            self._log(
                f"{name} passed at {before['commit'][:10]} with seed {before['seed']}, and nothing changed"
            )
            return True
        seed, started = secrets.randbelow(2**20), time.monotonic()
        self._log(f"{name}: seed {seed}")
        arguments = [argument.replace("SEED", str(seed)) for argument in part.arguments]
        status = self._limited([*self._nox, part.session, "--", *arguments], part.limit_s)
        minutes = round((time.monotonic() - started) / 60, 1)
        self._log(f"{name}: {'passed' if status == 0 else f'failed with {status}'} after {minutes} minutes")
        if status == 0:
            entry = {"key": key, "commit": self._commit, "seed": seed, "minutes": minutes}
            temporary = self._record.with_suffix(".new")
            temporary.write_text(json.dumps({**self._passed(), name: entry}, indent=2) + "\n")
            temporary.replace(self._record)
        return status == 0

    def _limited(self, command: Sequence[str], limit_s: float) -> int | str:
        """The exit status of ``command`` in the worktree, whose processes all end with it."""
        # A path to the checkout would come before what is installed from the worktree.
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        with subprocess.Popen(command, cwd=self._worktree, env=env, start_new_session=True) as process:
            try:
                return process.wait(limit_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(ENDING_S)
                return f"no result in {limit_s / 60:g} minutes"
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    def key(self, name: str) -> str:
        """A digest of the git objects and arguments of a part. Raises `SystemExit` for a path that is not in git."""
        part = self._parts[name]
        objects = [_git(self._root, "rev-parse", f"{self._commit}:{path}") for path in part.paths]
        return hashlib.sha256(json.dumps([part.session, part.arguments, objects]).encode()).hexdigest()

    def _passed(self) -> dict[str, dict[str, str]]:
        passed: dict[str, dict[str, str]] = (
            json.loads(self._record.read_text()) if self._record.exists() else {}
        )
        return passed


def _git(directory: Path, *arguments: str) -> str:
    result = subprocess.run(["git", *arguments], cwd=directory, check=False, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"git {' '.join(arguments)} failed: {result.stderr.strip()}")
    return result.stdout.strip()


if __name__ == "__main__":
    if failed := Nightly(Path(__file__).parent).run(sys.argv[1:]):
        raise SystemExit(f"nightly: failed: {', '.join(failed)}")
