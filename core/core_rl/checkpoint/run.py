"""The checkpoint of a whole run: all engines, the data loader's and the rollout state, renamed into place once."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core_rl.checkpoint.directory import LocalStorage, is_temporary, is_url, open_checkpoint, remove_stale
from core_rl.checkpoint.manifest import MANIFEST, Manifest, file_names, read_manifest, records_of, to_json
from core_rl.distributed.agreement import on_leader
from core_rl.distributed.comm import Comm
from core_rl.errors import CheckpointDamaged, CheckpointError, CheckpointNotFound, ConfigError, raise_all

logger = logging.getLogger(__name__)

STEP = re.compile(r"^\.?step-(\d{8,})(\.core-rl-old)?$")
STATE = "state.json"
KIND = "run"


@dataclass(frozen=True, kw_only=True)
class RunCheckpoint:
    """One complete checkpoint of a run. Its own files are verified; an engine verifies its part when it loads it."""

    path: Path
    step: int
    state: Mapping[str, Any]

    def part(self, name: str) -> Path:
        """The directory of a part; `CheckpointNotFound` if this run had none of this name."""
        directory = self.path / name
        if not directory.is_dir():
            raise CheckpointNotFound(f"the run checkpoint {self.path} has no part {name!r}")
        return directory


class RunCheckpoints:
    """The checkpoints of one run under ``root``: ``step-00000010/{part}/…``, the newest ``keep`` of them.

    For the driver process alone. ``root`` is a local directory; a URL is a `ConfigError`.
    """

    def __init__(self, root: str | Path, keep: int) -> None:
        if is_url(str(root)):
            raise ConfigError(f"run checkpoints are kept in a local directory; {str(root)!r} is a URL")
        if keep < 1:
            raise ConfigError(f"keep = {keep}; at least one checkpoint must be kept")
        self.root = Path(root).expanduser().resolve()
        self.keep = keep

    def save(self, step: int, parts: Mapping[str, Callable[[Path], None]], state: Mapping[str, Any]) -> Path:
        """`begin`, and `PendingCheckpoint.finish` at once. Returns the checkpoint's path."""
        return self.begin(step, parts, state).finish()

    def begin(
        self, step: int, parts: Mapping[str, Callable[[Path], None]], state: Mapping[str, Any]
    ) -> PendingCheckpoint:
        """Save step ``step``: each part writes into an empty directory of its own.

        A part may itself save a checkpoint at that path, also in the background. Only when all parts are complete, and
        `PendingCheckpoint.finish` is called, does the step appear, and only then are old ones removed. Raises
        `CheckpointError`, with everything that was there before untouched, if a part fails, if ``state`` is not JSON,
        or if ``root`` holds a later step: a resume would continue from that one.
        """
        for name in parts:
            if "/" in name or name.startswith(".") or name in ("", STATE, MANIFEST):
                raise CheckpointError(
                    f"{name!r} cannot name a part of a run checkpoint; use letters and digits"
                )
        later = [saved for saved in self.steps() if saved > step]
        if later:
            raise CheckpointError(
                f"{self.root} already holds step {max(later)}, later than step {step}; resume from it, remove it, "
                "or choose another directory"
            )

        self.root.mkdir(parents=True, exist_ok=True)
        remove_stale(self.root, ".step-")
        storage = LocalStorage(str(self._path(step)))
        with ExitStack() as stack:

            def write() -> Path:
                staged = stack.enter_context(storage.staging())
                (staged / STATE).write_text(to_json(dict(state), "the state of the run") + "\n")
                for name, part in parts.items():
                    (staged / name).mkdir()
                    part(staged / name)
                return staged

            staged = on_leader(Comm(), write, _subject(storage.path), CheckpointError)
            return PendingCheckpoint(storage, staged, step, stack.pop_all(), self._remove_old)

    def latest(self) -> RunCheckpoint | None:
        """The newest complete checkpoint; None if there is none.

        Raises `CheckpointDamaged`, with the file's name, when the newest has changed.
        """
        steps = self.steps()
        if not steps:
            return None
        try:
            return self.at(steps[-1])
        except CheckpointDamaged as error:
            before = f"go on from step {steps[-2]}" if len(steps) > 1 else "start anew"
            path = self._path(steps[-1])
            raise CheckpointDamaged(f"{error}\nRestore the file, or remove {path} to {before}") from error

    @contextmanager
    def reading(self, step: int | None = None) -> Iterator[RunCheckpoint | None]:
        """The checkpoint of ``step``, or the newest, while a run may continue: its files stay until the context ends.

        None where there is no checkpoint at all. Raises as `at` does.
        """
        with ExitStack() as stack:
            yield self._linked(step, stack)

    def _linked(self, step: int | None, stack: ExitStack) -> RunCheckpoint | None:
        while steps := self.steps():
            number = steps[-1] if step is None else step
            try:
                return _open(stack.enter_context(LocalStorage(str(self._path(number))).linked()))
            except CheckpointNotFound:
                if step is not None or self.steps()[-1:] == [number]:
                    return self.at(number)
            except CheckpointDamaged:
                return self.at(number)  # the error with the checkpoint's path
        return None if step is None else self.at(step)

    def at(self, step: int) -> RunCheckpoint:
        """The checkpoint of ``step``.

        Raises `CheckpointNotFound` with the steps that there are, and `CheckpointDamaged` with the file's name.
        """
        if step not in self.steps():
            available = ", ".join(map(str, self.steps())) or "none"
            raise CheckpointNotFound(
                f"{self.root} has no checkpoint of step {step}; available steps: {available}"
            )
        return _open(self._path(step))

    def steps(self) -> list[int]:
        """The steps that are there, in order, not verified."""
        if not self.root.is_dir():
            return []
        return sorted({int(match[1]) for entry in self.root.iterdir() if (match := STEP.match(entry.name))})

    def _path(self, step: int) -> Path:
        return self.root / name_of(step)

    def _remove_old(self) -> None:
        for step in self.steps()[: -self.keep]:
            try:
                LocalStorage(str(self._path(step))).remove()
            except OSError as error:  # the new checkpoint is complete: not worth stopping a run for
                logger.warning("cannot remove the old checkpoint of step %d: %s", step, error)


class PendingCheckpoint:
    """Checkpoint of a run whose parts may still be written in the background. `finish` or `abandon` ends it."""

    def __init__(
        self,
        storage: LocalStorage,
        staged: Path,
        step: int,
        resources: ExitStack,
        remove_old: Callable[[], None],
    ) -> None:
        self.path = storage.path
        self.step = step
        self._storage = storage
        self._staged = staged
        self._resources = resources
        self._remove_old = remove_old

    @property
    def is_written(self) -> bool:
        """Whether no part is being written any more. A part that failed has no files."""
        return not any(map(is_temporary, self._staged.iterdir()))

    def finish(self) -> Path:
        """Put the complete checkpoint in place, and return its path.

        Raises `CheckpointError` where it cannot be put there, or a part is missing.
        """
        with self._resources:
            problems = [] if self.is_written else ["parts are still being written; wait for them first"]
            parts = [entry for entry in sorted(self._staged.iterdir()) if entry.is_dir()]
            problems += [f"nothing was written of {part.name!r}" for part in parts if not any(part.iterdir())]
            raise_all(CheckpointError, f"cannot save {self.path}", problems)
            on_leader(Comm(), self._commit, _subject(self.path), CheckpointError)
        self._remove_old()
        return self.path

    def abandon(self) -> None:
        self._resources.close()

    def _commit(self) -> None:
        records = records_of(self._staged, file_names(self._staged))
        self._storage.commit(self._staged, Manifest.of(KIND, {"step": self.step}, records))


def name_of(step: int) -> str:
    """The directory of the checkpoint of ``step``."""
    return f"step-{step:08d}"


def _subject(path: Path) -> str:
    return f"cannot save {str(path)!r}, and what was there before is untouched"


def open_run_checkpoint(path: Path) -> RunCheckpoint | None:
    """The run checkpoint in the directory ``path``, whatever its name; None for another directory.

    Raises `CheckpointDamaged` when a file has changed.
    """
    if not (path / MANIFEST).is_file() or read_manifest(path).kind != KIND:
        return None
    return _open(path)


def _open(path: Path) -> RunCheckpoint:
    with open_checkpoint(str(path), Comm(), kind=KIND, nested_digests=False) as directory:
        step = int(read_manifest(directory).state["step"])
        state = json.loads((directory / STATE).read_text())
        return RunCheckpoint(path=directory, step=step, state=state)
