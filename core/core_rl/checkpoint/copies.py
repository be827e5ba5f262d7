"""Copies of run checkpoints under an fsspec URL, from which a run continues where its directory is gone."""

from __future__ import annotations

from pathlib import Path

from core_rl.checkpoint.local import LocalPlace
from core_rl.checkpoint.manifest import MANIFEST, all_files, find_damage, read_manifest
from core_rl.checkpoint.remote import RemotePlace, is_url
from core_rl.checkpoint.run import STEP, RunCheckpoints
from core_rl.distributed.agreement import on_leader
from core_rl.distributed.comm import Comm
from core_rl.errors import CheckpointDamaged, CheckpointError, ConfigError, raise_all

__all__ = ["CheckpointCopies"]


class CheckpointCopies:
    """The newest ``keep`` run checkpoints under ``url``, for one driver alone: ``step-00000010/…``.

    The manifest of a step is uploaded last: without it there is no copy. All methods raise `CheckpointError` with the
    URL and the reason of the store. Raises `ConfigError` for what is no URL, and `MissingPackage`.
    """

    def __init__(self, url: str, keep: int) -> None:
        if not is_url(url):
            raise ConfigError(f"{url!r} is not an fsspec URL, such as s3://bucket/run")
        self.url = url.rstrip("/")
        self.keep = keep
        RemotePlace(self.url)

    def steps(self) -> list[int]:
        """The steps with a complete copy, in order."""
        return on_leader(Comm(), self._complete, f"cannot list {self.url!r}", CheckpointError)

    def upload(self, step: int, directory: Path) -> None:
        """Copy the complete checkpoint in ``directory``, and then remove old and incomplete copies."""

        def copy() -> None:
            manifest = read_manifest(directory)
            names = sorted(set(all_files(directory, manifest)) - {MANIFEST})
            place = self._place(step)
            place.check_replaceable()
            place.begin()
            place.upload(directory, names)
            place.commit(manifest)
            kept = self._complete()[-self.keep :]
            for other in self._all():
                if other not in kept and other < step:
                    self._place(other).remove()

        subject = f"cannot copy the checkpoint of step {step} to {self.url!r}; it is in {directory}"
        on_leader(Comm(), copy, subject, CheckpointError)

    def download(self, checkpoints: RunCheckpoints) -> None:
        """Add the newest copy to ``checkpoints``, unless they have it or a later one.

        Raises `CheckpointDamaged` with the files that are not what was saved.
        """
        steps, own = self.steps(), checkpoints.steps()
        if steps and (not own or own[-1] < steps[-1]):
            step = steps[-1]
            subject = f"cannot read the checkpoint of step {step} in {self.url!r}"
            on_leader(Comm(), lambda: self._fetch(step, checkpoints.root), subject)

    def clear(self) -> None:
        """Remove all copies."""

        def remove() -> None:
            for step in self._all():
                self._place(step).remove()

        on_leader(Comm(), remove, f"cannot remove the checkpoints in {self.url!r}", CheckpointError)

    def _fetch(self, step: int, root: Path) -> None:
        target = LocalPlace(str(root / _name(step)))
        with target.staging() as staged:
            place = self._place(step)
            found, names = place.files()
            place.download(found, names, staged)
            manifest = read_manifest(staged)
            damage = find_damage(staged, all_files(staged, manifest))
            raise_all(CheckpointDamaged, "the copy is damaged", list(damage.values()))
            target.commit(staged, manifest)

    def _place(self, step: int) -> RemotePlace:
        return RemotePlace(f"{self.url}/{_name(step)}")

    def _all(self) -> list[int]:
        names = RemotePlace(self.url).names()
        return sorted(int(match[1]) for name in names if (match := STEP.match(name)))

    def _complete(self) -> list[int]:
        return [step for step in self._all() if self._place(step).manifest_bytes() is not None]


def _name(step: int) -> str:
    return f"step-{step:08d}"
