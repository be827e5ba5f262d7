"""The formats in which a train engine saves itself; see `SaveLoadMeta.format`.

``hf`` is a model directory of transformers. ``portable`` has the named tensors of weights and moments, and progress,
for any engine and layout. ``sharded`` and ``adapter`` have modules of their own.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from core_rl.backend.meta import EngineProgress, SaveLoadMeta, TensorKind
from core_rl.backend.protocols import SupportsOwnExport
from core_rl.backend.tensors import MappedSource, TensorSource
from core_rl.checkpoint.adapters import load_adapter, save_adapter
from core_rl.checkpoint.background import BackgroundSave, Later, Write
from core_rl.checkpoint.contents import Contents, load_parts, publish_save
from core_rl.checkpoint.directory import opened
from core_rl.checkpoint.end_tokens import end_tokens, write_end_tokens
from core_rl.checkpoint.model_files import copy_model_files, copy_tokenizer
from core_rl.checkpoint.padding import set_padding
from core_rl.checkpoint.sharded import load_sharded, save_sharded
from core_rl.checkpoint.shards import ShardFiles, write_copies
from core_rl.checkpoint.tensor_files import TensorFiles, write_tensors
from core_rl.distributed.agreement import on_all
from core_rl.errors import CheckpointError
from core_rl.state.slices import copy_shards

__all__ = ["load_contents", "save_contents"]

PARTS = ".parts"


def _save_hf(contents: Contents, meta: SaveLoadMeta) -> BackgroundSave | None:
    """Safetensors, config, generation config and tokenizer; collective."""
    kinds = contents.tensors.export_kinds("params")

    def write(directory: Path) -> None:
        stream = (item for kind in kinds for item in contents.tensors.stream(kind))
        write_tensors(directory, "model", stream, writes=contents.is_writer)
        if contents.is_writer:
            write_rest(directory)

    def write_rest(directory: Path) -> None:
        model = contents.config.model
        config.save_pretrained(directory)  # transformers takes the class of a tokenizer from it
        copy_model_files(model.path, directory)
        copy_tokenizer(meta.tokenizer_path, model.path, directory)
        ends = end_tokens(config, model.path, meta.tokenizer_path)
        if model.head == "lm":
            write_end_tokens(directory, config, ends)
        else:
            set_padding(directory, config, ends)
            config.save_pretrained(directory)

    config = copy.deepcopy(contents.backend.hf_config())
    config.dtype = contents.config.dtype
    state = {"model": contents.fingerprint(), "version": contents.progress.version}
    return publish_save(
        contents, meta, write, state, lambda: _tensors_later(contents, {"model": kinds}, write_rest)
    )


def _load_hf(contents: Contents, meta: SaveLoadMeta) -> None:
    """Weights only: progress, and moments if there are some, stay as they are; collective."""
    kinds = contents.tensors.export_kinds("params")
    kind_of = {name: kind for kind in kinds for name in contents.tensors.shapes(kind)}
    with opened(meta.path, contents.world, kind="hf", require_manifest=False) as directory:

        def parts() -> Mapping[TensorKind, TensorSource]:
            source = TensorFiles(directory, "model")
            names: dict[TensorKind, dict[str, str]] = {kind: {} for kind in kinds}
            for name in source.names():
                names[kind_of.get(name, "params")][name] = name
            return {kind: MappedSource(source, found) for kind, found in names.items()}

        load_parts(contents, parts, f"cannot load {meta.path!r}")


def _save_portable(contents: Contents, meta: SaveLoadMeta) -> BackgroundSave | None:
    """Float32 weights, and where asked moments; collective."""
    kinds = contents.kinds(meta)

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
    return publish_save(contents, meta, write, state, lambda: _tensors_later(contents, files))


def _load_portable(contents: Contents, meta: SaveLoadMeta) -> EngineProgress | None:
    """Weights, and where asked moments; returns the progress where asked. Collective."""
    subject = f"cannot load {meta.path!r}"
    with opened(meta.path, contents.world, kind="portable") as directory:
        state = on_all(contents.world, lambda: contents.checked_state(meta, directory), subject)
        kinds = contents.kinds(meta)
        load_parts(contents, lambda: {kind: TensorFiles(directory, kind) for kind in kinds}, subject)
    return EngineProgress(**state["progress"]) if meta.with_optimizer else None


def _tensors_later(
    contents: Contents, files: Mapping[str, Sequence[TensorKind]], write_rest: Write | None = None
) -> Later | None:
    """Named tensors from a snapshot: every rank writes its slices, and rank 0 joins them.

    ``files`` gives the kinds for the files of each prefix, and ``write_rest`` writes all other files. None where the
    backend exports by itself, so that only it knows what to copy.
    """
    if isinstance(contents.backend, SupportsOwnExport):
        return None
    rank, size = contents.world.rank, contents.world.size
    shapes = {kind: contents.tensors.shapes(kind) for kinds in files.values() for kind in kinds}
    # Nobody changes carried tensors: they are read from the model's files at the end.
    copies = copy_shards(rank, contents.tensors.shards([kind for kind in shapes if kind != "carried"]))

    def write(directory: Path) -> None:
        parts = directory / PARTS
        parts.mkdir(exist_ok=True)
        write_copies(parts, rank, copies, size)
        copies.clear()

    def finish(directory: Path) -> None:
        parts, carried = ShardFiles(directory / PARTS), contents.tensors.carried

        def read(kind: TensorKind, name: str) -> Tensor:
            return carried.read(name) if kind == "carried" else parts.read(f"{kind}/{name}")

        for prefix, kinds in files.items():
            stream = ((name, read(kind, name)) for kind in kinds for name in shapes[kind])
            write_tensors(directory, prefix, stream, writes=True)
        shutil.rmtree(directory / PARTS)
        if write_rest is not None:
            write_rest(directory)

    return Later(write, finish)


SAVE = {"hf": _save_hf, "portable": _save_portable, "sharded": save_sharded, "adapter": save_adapter}
LOAD = {"hf": _load_hf, "portable": _load_portable, "sharded": load_sharded, "adapter": load_adapter}


def save_contents(contents: Contents, meta: SaveLoadMeta) -> BackgroundSave | None:
    """Save ``contents`` in ``meta.format``; collective. Returns the save in the background, if one was asked for.

    Raises one `CheckpointError` on all ranks when anything fails on any of them; what was at the path stays.
    """
    return SAVE[meta.format](contents, meta)


def load_contents(contents: Contents, meta: SaveLoadMeta) -> EngineProgress | None:
    """Load what `save_contents` wrote, or for ``hf`` any model directory of transformers; collective.

    Files, model and names are checked before anything changes. Returns the progress to restore, if any. Raises
    `CheckpointNotFound`, `CheckpointDamaged` or `CheckpointMismatch`, and `WeightsError` for a model directory with
    other tensors; the same on all ranks.
    """
    return LOAD[meta.format](contents, meta)
