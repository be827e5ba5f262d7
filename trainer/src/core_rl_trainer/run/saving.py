"""The checkpoints of a run: begun at the end of a step, and put in place while or after the next one trains.

The parts of engines are written in an engine's own format and in ``portable``, and read in either.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from core_rl.backend.meta import CheckpointFormat, SaveLoadMeta
from core_rl.checkpoint.manifest import read_manifest
from core_rl.checkpoint.run import PendingCheckpoint, RunCheckpoint, RunCheckpoints
from core_rl.config.capability import Capability
from core_rl.config.layout import ParallelLayout
from core_rl.errors import CheckpointDamaged, CheckpointMismatch, CoreRLError, GroupError, RankFailed
from core_rl.launch.group import EngineGroup
from core_rl.registry.spec import EngineSpec
from core_rl_trainer.plan.engines import resume_format
from core_rl_trainer.run.signals import DeferredInterrupt

logger = logging.getLogger(__name__)

PORTABLE = "-portable"
"""The end of the name of a part that is written in ``portable`` besides the engine's own format."""


class RunSaver:
    """Writer of run checkpoints, one at a time. Until it is in place, the previous one is the run's newest."""

    def __init__(
        self,
        checkpoints: RunCheckpoints,
        wait_for_parts: Callable[[], None],
        saved: Callable[[int, Path], None],
    ) -> None:
        """``wait_for_parts()`` returns when the engines have written theirs, or raises their error; ``saved(step,
        path)`` is called when a checkpoint is in place.
        """
        self._checkpoints = checkpoints
        self._wait_for_parts = wait_for_parts
        self._saved = saved
        self._pending: PendingCheckpoint | None = None
        self._at_work = False
        self._interrupt = DeferredInterrupt(self._is_busy)

    def begin(self, step: int, parts: Mapping[str, Callable[[Path], None]], state: Mapping[str, Any]) -> None:
        """Save ``step``; the engines may write on when this returns. Finishes the previous one."""
        self.finish()
        with self._working():
            self._pending = self._checkpoints.begin(step, parts, state)
        self._interrupt.raise_noted()

    def finish_if_written(self) -> None:
        """Put the checkpoint in place if all files are written. Raises `KeyboardInterrupt` for an earlier Ctrl-C."""
        self._interrupt.raise_noted()
        if self._pending is not None and self._pending.is_written:
            self.finish()

    def finish(self) -> None:
        """Wait for the checkpoint on its way, and put it in place. Raises `CheckpointError` where that fails."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        with self._working():
            path = self._put_in_place(pending)
        self._saved(pending.step, path)
        self._interrupt.raise_noted()

    def _put_in_place(self, pending: PendingCheckpoint) -> Path:
        try:
            self._wait_for_parts()
        except GroupError as error:
            if isinstance(error, RankFailed) or not pending.is_written:  # else only the ranks are lost
                pending.abandon()
                raise
        except BaseException:
            pending.abandon()
            raise
        return pending.finish()

    @contextmanager
    def _working(self) -> Iterator[None]:
        self._at_work = True
        try:
            yield
        finally:
            self._at_work = False

    def _is_busy(self) -> bool:
        """Whether a checkpoint is on its way that is lost when the engines end."""
        return self._at_work or (self._pending is not None and not self._pending.is_written)

    @contextmanager
    def completed(self) -> Iterator[None]:
        """On leaving, the checkpoint on its way is in place: also after an error, as far as the engines still live."""
        with self._interrupt.caught():
            try:
                yield
            except (
                BaseException
            ):  # at a signal too: the engines wait for their saves in any case when they end
                step = self._pending.step if self._pending is not None else None
                try:
                    self.finish()
                except CoreRLError as second:  # it must not hide the error that is on its way
                    logger.warning("the checkpoint of step %s was not completed: %s", step, second)
                raise
            self.finish()


def part_writers(
    groups: Mapping[str, EngineGroup], *, portable: bool, background: bool
) -> dict[str, Callable[[Path], None]]:
    """Writers by the names of their parts, with ``portable`` for other engines and layouts too.

    In the ``background``, the files of an engine's own format are still to come when its writer returns.
    """
    writers: dict[str, Callable[[Path], None]] = {}
    for name, group in groups.items():
        exact_format = resume_format(group.spec)
        if portable and exact_format != "portable":  # first: a save waits for the previous save
            writers[f"{name}{PORTABLE}"] = partial(_save, group, "portable", False)
        writers[name] = partial(_save, group, exact_format, background)
    return writers


def _save(group: EngineGroup, name: CheckpointFormat, background: bool, path: Path) -> None:
    group.save(SaveLoadMeta(path=str(path), format=name, asynchronous=background))


def has_portable(checkpoint: RunCheckpoint, roles: Mapping[str, EngineSpec]) -> bool:
    """Whether engines of another kind or layout can read the parts of ``roles``."""
    return all(
        resume_format(spec) == "portable" or (checkpoint.path / f"{name}{PORTABLE}").is_dir()
        for name, spec in roles.items()
    )


def readable_part(
    checkpoint: RunCheckpoint, name: str, spec: EngineSpec, layout: ParallelLayout
) -> SaveLoadMeta:
    """Path and format of the part ``name`` for an engine ``spec`` at ``layout``: the exact one where it can read that.

    Raises `CheckpointMismatch` where it can read neither.
    """
    part = checkpoint.part(name)
    manifest = read_manifest(part)
    portable = part.with_name(f"{name}{PORTABLE}")
    if manifest.kind == "portable":
        return SaveLoadMeta(path=str(part), format="portable")
    engine, saved = manifest.state["engine"], ParallelLayout.model_validate(manifest.state["layout"])
    if engine == spec.name and (saved == layout or spec.supports(Capability.RESHARDING)):
        return SaveLoadMeta(path=str(part), format="sharded")
    if portable.is_dir():
        return SaveLoadMeta(path=str(portable), format="portable")
    raise CheckpointMismatch(
        f"the {name} in {checkpoint.path} was saved by the engine {engine!r} at {saved} in a format of its own, and "
        f"this run has {spec.name!r} at {layout}. Resume the earlier run with save_portable_every=N, also if it is "
        "complete: its next checkpoint can be read by any engine"
    )


def restore_parts(groups: Mapping[str, EngineGroup], checkpoint: RunCheckpoint) -> None:
    """Load ``checkpoint``; `CheckpointDamaged` for changed files, `CheckpointMismatch` for parts of other steps."""
    for name, group in groups.items():
        try:
            group.load(readable_part(checkpoint, name, group.spec, group.layout))
        except CheckpointDamaged as error:
            raise CheckpointDamaged(
                f"{error}\nRestore the file, or remove {checkpoint.path} to go on from the checkpoint before it"
            ) from error
        version = group.get_version()
        if version != checkpoint.step:
            raise CheckpointMismatch(
                f"{checkpoint.path} is of step {checkpoint.step}, and its {name} of version {version}; remove it"
            )
