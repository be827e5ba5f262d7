"""``format="portable"``: named tensors of weights and moments, and progress, for any engine and layout."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from core_rl.backend.meta import EngineProgress, SaveLoadMeta, TensorKind
from core_rl.backend.protocols import SupportsOwnExport
from core_rl.checkpoint.background import BackgroundSave, Later, Write
from core_rl.checkpoint.contents import Contents, load_parts, publish_save
from core_rl.checkpoint.directory import opened
from core_rl.checkpoint.shards import ShardFiles, write_copies
from core_rl.checkpoint.tensor_files import TensorFiles, write_tensors
from core_rl.distributed.agreement import on_all
from core_rl.errors import CheckpointError
from core_rl.state.slices import copy_shards

__all__ = ["load_portable", "save_portable", "tensors_later"]

PARTS = ".parts"


def save_portable(contents: Contents, meta: SaveLoadMeta) -> BackgroundSave | None:
    """Float32 weights, and where asked moments; collective."""
    kinds = _kinds(contents, meta)

    def write(directory: Path) -> None:
        errors = []
        for kind in kinds:
            try:
                write_tensors(directory, kind, contents.tensors.stream(kind), writes=contents.is_writer)
            except CheckpointError as error:  # of this rank alone: the others continue with the next kind
                errors.append(error)
        if errors:
            raise errors[0]

    files: dict[str, Sequence[TensorKind]] = {kind: (kind,) for kind in kinds}
    state = contents.state(contents.with_moments(meta))
    return publish_save(contents, meta, write, state, lambda: tensors_later(contents, files))


def load_portable(contents: Contents, meta: SaveLoadMeta) -> EngineProgress | None:
    """Weights, and where asked moments; returns the progress where asked. Collective."""
    subject = f"cannot load {meta.path!r}"
    with opened(meta.path, contents.world, kind="portable") as directory:
        state = on_all(contents.world, lambda: contents.checked_state(meta, directory), subject)
        kinds = _kinds(contents, meta)
        load_parts(contents, lambda: {kind: TensorFiles(directory, kind) for kind in kinds}, subject)
    return EngineProgress(**state["progress"]) if meta.with_optimizer else None


def _kinds(contents: Contents, meta: SaveLoadMeta) -> tuple[TensorKind, ...]:
    moments = contents.tensors.optimizer_kinds if contents.with_moments(meta) else ()
    return (*contents.tensors.weight_kinds("master"), *moments)


def tensors_later(
    contents: Contents, files: Mapping[str, Sequence[TensorKind]], write_rest: Write | None = None
) -> Later | None:
    """Named tensors from a snapshot: every rank writes its slices, and rank 0 joins them.

    ``files`` gives the kinds for the files of each prefix, and ``write_rest`` writes all other files. None where the
    backend exports by itself, so that only it knows what to copy.
    """
    if isinstance(contents.backend, SupportsOwnExport):
        return None
    rank, size = contents.world.rank, contents.world.size
    names = {
        prefix: [(kind, name) for kind in kinds for name in contents.tensors.shapes(kind)]
        for prefix, kinds in files.items()
    }
    copies = copy_shards(rank, contents.tensors.shards([kind for kinds in files.values() for kind in kinds]))

    def write(directory: Path) -> None:
        parts = directory / PARTS
        parts.mkdir(exist_ok=True)
        write_copies(parts, rank, copies, size)
        copies.clear()

    def finish(directory: Path) -> None:
        parts = ShardFiles(directory / PARTS)
        for prefix, found in names.items():
            stream = ((name, parts.read(f"{kind}/{name}")) for kind, name in found)
            write_tensors(directory, prefix, stream, writes=True)
        shutil.rmtree(directory / PARTS)
        if write_rest is not None:
            write_rest(directory)

    return Later(write, finish)
