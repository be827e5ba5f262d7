"""Checkpoints that lose what only some models have, or hold more than they were asked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch import Tensor

from core_rl.backend.meta import SaveLoadMeta
from core_rl.backend.tensors import NamedTensors, TensorSource
from core_rl.engine.components import Persistence
from core_rl.reference.train import ReferenceBackend
from mutants.bases import MOMENTS, OwnCheckpoint, OwnExport, inside
from mutants.unchanged import unchanged
from mutants.zoo import Mutant

HEAD = "score.weight"


@Mutant("I11.resume-value-head", "a critic that starts again from noise (I11)", "first: score.weight")
class HeadNotInShards(OwnCheckpoint):
    """A sharded checkpoint leaves the value head as it was."""

    def load_sharded(self, directory: Path, with_optimizer: bool) -> None:
        with unchanged(part for part in self.state().local("master") if part.name == HEAD):
            super().load_sharded(directory, with_optimizer)


@Mutant("I11.portable-round-trip", "moments beside frozen parameters (I11)", "exp_avg after the load")
class FrozenModelsLoseMoments(OwnExport):
    """With a frozen parameter, no moments are loaded by name."""

    def import_tensors(self, kind: str, source: TensorSource) -> None:
        frozen = any(not parameter.requires_grad for parameter in self.model.parameters())
        if not (frozen and kind in MOMENTS):
            super().import_tensors(kind, source)


@Mutant(
    "I11.portable-round-trip", "a head beside the model (I11)", "exp_avg after the load of .portable.: 1 of"
)
class HeadLosesMoments(OwnExport):
    """The moments of the value head are not loaded by name."""

    def import_tensors(self, kind: str, source: TensorSource) -> None:
        moments = self.state().local(kind) if kind in MOMENTS else ()
        with unchanged(part for part in moments if part.name == HEAD):
            super().import_tensors(kind, source)


@Mutant(
    "I11.weights-only",
    "momentum of another run (I11)",
    "exp_avg after 'sharded' was loaded with_optimizer=False",
)
class LoadsMomentsUnasked(OwnCheckpoint):
    """``with_optimizer=False`` is not looked at where moments are in the files."""

    def load_sharded(self, directory: Path, with_optimizer: bool) -> None:
        super().load_sharded(directory, with_optimizer or _holds_moments(directory / "own"))


def _holds_moments(directory: Path) -> bool:
    return any(b"exp_avg" in file.read_bytes() for file in directory.iterdir())


@Mutant("I11.weights-only", "an argument that is not passed on (I11)", "moments are saved all the same")
@inside(ReferenceBackend, "persistence")
class SavesMomentsUnasked(Persistence):
    """``with_optimizer=False`` saves moments all the same."""

    def save(self, meta: SaveLoadMeta) -> None:
        super().save(replace(meta, with_optimizer=True))


@Mutant("I11.weights-only", "a version of another run (I11)", "the progress after")
@inside(ReferenceBackend, "persistence")
class LoadsProgressUnasked(Persistence):
    """Weights that come alone bring the version of their run."""

    def load(self, meta: SaveLoadMeta) -> None:
        super().load(meta)
        progress = self.step.progress
        if not meta.with_optimizer:
            self.step.progress = replace(progress, version=progress.version + 1)


@Mutant("I12.disk", "caches that outlive a load (verl #7014)", "parameters of the export after a load")
class UploadsWhatWasBeforeTheLoad(OwnExport):
    """Weights gathered for an upload are dropped by a step, and not by a load."""

    _gathered: dict[str, Tensor] | None = None

    def step(self, scale: float, lr: float, count: int) -> None:
        super().step(scale, lr, count)
        self._gathered = None

    def export_tensors(self, kind: str) -> NamedTensors:
        if kind != "params":
            yield from super().export_tensors(kind)
            return
        if self._gathered is None:
            self._gathered = {n: v.clone() for n, v in super().export_tensors(kind) if v is not None}
        yield from self._gathered.items()


@Mutant("I11.portable-to-reference", "moments under each other's name (I11)", "second moments are negative")
class MomentsSwapped(OwnExport):
    """Each moment goes out under the name of the other one, and comes in so."""

    def export_tensors(self, kind: str) -> NamedTensors:
        swapped = {"exp_avg": "exp_avg_sq", "exp_avg_sq": "exp_avg"}
        return super().export_tensors(swapped.get(kind, kind))
