"""The formats in which a train engine saves itself; see `SaveLoadMeta.format`.

``hf`` is a model directory of transformers. ``portable`` has the named tensors of weights and moments, and progress,
for any engine and layout. ``sharded`` has each rank's slices, opaque state and random states, and progress.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from core_rl.backend.meta import EngineProgress, SaveLoadMeta, TensorKind
from core_rl.backend.protocols import (
    SupportsLora,
    SupportsOpaqueState,
    SupportsOwnCheckpoint,
    SupportsOwnExport,
    SupportsRngState,
)
from core_rl.backend.tensors import MappedSource, TensorSource
from core_rl.checkpoint.adapter_config import ADAPTER_CONFIG, adapter_problems
from core_rl.checkpoint.background import BackgroundSave, DeferredWrite, Write
from core_rl.checkpoint.contents import Contents, load_tensors, save_files
from core_rl.checkpoint.directory import open_checkpoint
from core_rl.checkpoint.end_tokens import end_tokens, set_padding, write_end_tokens
from core_rl.checkpoint.manifest import MANIFEST, read_manifest
from core_rl.checkpoint.model_files import copy_model_files, copy_tokenizer
from core_rl.checkpoint.shards import ShardFiles, file_name, write_copies
from core_rl.checkpoint.tensor_files import TensorFiles, write_tensors
from core_rl.config.capability import Capability
from core_rl.config.layout import ParallelLayout
from core_rl.distributed.agreement import on_all, on_leader
from core_rl.errors import CheckpointMismatch, UnsupportedCapability, raise_all
from core_rl.state.slices import Shard, copy_shards

TENSOR_FILE = "adapter_model"
SHARDS = "shards"
"""Directory of a checkpoint with the files of `ShardFiles`."""
PARTS = ".parts"
"""Directory of the slices that the writer joins."""


def save_adapter(contents: Contents, meta: SaveLoadMeta) -> BackgroundSave | None:
    """``adapter_model.safetensors`` and ``adapter_config.json``, which ``peft`` and servers load; collective."""
    backend = contents.backend
    assert isinstance(backend, SupportsLora)  # required by the engine

    def write(directory: Path) -> None:
        stream = contents.tensors.stream("adapter")
        # One file, whatever its size: peft reads no index.
        write_tensors(directory, TENSOR_FILE, stream, writes=contents.is_writer, max_file_bytes=1 << 62)
        if contents.is_writer:
            text = json.dumps(backend.adapter_config(), indent=2, sort_keys=True)
            (directory / ADAPTER_CONFIG).write_text(text + "\n")
            if meta.tokenizer_path is not None:
                copy_tokenizer(meta.tokenizer_path, None, directory)

    state = {
        "model": contents.fingerprint(),
        "base": contents.tensors.base_digest(),
        "version": contents.progress.version,
    }
    # An adapter is small: its files are written at once, also for a save in the background.
    return save_files(contents, meta, write, state, lambda: None)


def load_adapter(contents: Contents, meta: SaveLoadMeta) -> None:
    """The adapter alone: the base, progress and moments stay as they are; collective.

    Also takes the files of ``peft`` itself, which do not identify the base weights: then only names and
    shapes are checked. Raises `CheckpointMismatch` that lists what differs.
    """
    expected = {"model": contents.fingerprint(), "base": contents.tensors.base_digest()}
    model = contents.config.model
    lora = model.lora
    assert lora is not None  # required by the engine
    with open_checkpoint(meta.path, contents.world, kind="adapter", require_manifest=False) as directory:

        def parts() -> dict[TensorKind, TensorSource]:
            problems = [*adapter_problems(lora, model.head, directory), *_base_problems(expected, directory)]
            raise_all(CheckpointMismatch, "the adapter does not fit this engine", problems)
            return {"adapter": TensorFiles(directory, TENSOR_FILE)}

        load_tensors(contents, parts, f"cannot load {meta.path!r}")


def _base_problems(expected: Mapping[str, Any], directory: Path) -> Iterator[str]:
    """Differences between this model and the base model in the manifest of a core-rl adapter."""
    if not (directory / MANIFEST).is_file():
        return
    state = read_manifest(directory).state
    for name, value in expected["model"].items():
        if state["model"].get(name) != value:
            yield f"it is of another base model: {name} is {state['model'].get(name)!r} there and {value!r} here"
    if state["model"] == expected["model"] and state["base"] != expected["base"]:
        yield (
            "it is of another base model: the same architecture with other weights "
            f"(digest {state['base'][:8]} there and {expected['base'][:8]} here); set model.path to the base that "
            "it was trained on"
        )


def _save_sharded(contents: Contents, meta: SaveLoadMeta) -> BackgroundSave | None:
    """Weights, and where asked moments and random states; collective."""
    with_optimizer = contents.with_moments(meta)
    rank, size = contents.world.rank, contents.world.size
    native = contents.backend if isinstance(contents.backend, SupportsOwnCheckpoint) else None

    def snapshot() -> DeferredWrite:
        copies = copy_shards(rank, _shards(contents, meta))

        def write_later(directory: Path) -> None:
            write_copies(_shard_directory(directory), rank, copies, size)
            copies.clear()

        return DeferredWrite(write_later, final=f"{SHARDS}/{file_name(rank)}")

    def write(directory: Path) -> None:
        if native is not None:
            native.save_sharded(_shard_directory(directory), with_optimizer)
        snapshot().write(directory)

    state = contents.state(with_optimizer)
    return save_files(contents, meta, write, state, lambda: snapshot() if native is None else None)


def _load_sharded(contents: Contents, meta: SaveLoadMeta) -> EngineProgress | None:
    """Load a checkpoint of the same engine; returns its progress if requested. Collective.

    Raises `UnsupportedCapability` before any tensor is read, where it was saved at another layout, and the engine does
    not declare `Capability.RESHARDING`.
    """
    subject = f"cannot load {meta.path!r}"
    with_optimizer = contents.with_moments(meta)
    with open_checkpoint(meta.path, contents.world, kind="sharded") as directory:
        state = on_all(contents.world, lambda: contents.checked_state(meta, directory), subject)
        saved = ParallelLayout.model_validate(state["layout"])
        layout = contents.config.layout
        if saved != layout and not contents.resharding:
            raise UnsupportedCapability(
                f"{meta.path!r} was saved at the layout {saved}, and this is {layout}: the engine {contents.engine!r} "
                f"does not declare {Capability.RESHARDING.value!r}; load it at {saved}, or save with format='portable'"
            )
        # Rank 0 reads the headers of all files; each rank then opens the files of its slices.
        files = on_leader(contents.world, lambda: ShardFiles(directory / SHARDS), subject)
        backend = contents.backend
        if isinstance(backend, SupportsOwnCheckpoint):
            native = backend
            on_all(contents.world, lambda: native.load_sharded(directory / SHARDS, with_optimizer), subject)
        else:
            for kind in contents.kinds(meta):
                keys = {name: f"{kind}/{name}" for name in contents.tensors.shapes(kind)}
                contents.tensors.load(kind, MappedSource(files, keys))
        if with_optimizer:
            same = saved == contents.config.layout
            on_all(contents.world, lambda: _load_local_state(contents, files, same_layout=same), subject)
    return EngineProgress(**state["progress"]) if meta.with_optimizer else None


def _shards(contents: Contents, meta: SaveLoadMeta) -> Iterator[Shard]:
    """Tensors, unless the backend writes them itself, and where asked this rank's random and opaque states."""
    if not isinstance(contents.backend, SupportsOwnCheckpoint):
        yield from contents.tensors.shards(contents.kinds(meta))
    if not contents.with_moments(meta):
        return
    states = {f"rng/{name}": state for name, state in contents.rng.states().items()}
    if isinstance(contents.backend, SupportsRngState):
        states |= {f"backend_rng/{name}": state for name, state in contents.backend.rng_state().items()}
    if isinstance(contents.backend, SupportsOpaqueState):
        states |= {f"opaque/{name}": state for name, state in contents.backend.opaque_state().items()}
    for name, state in states.items():
        yield Shard(f"{name}/{contents.world.rank}", state, tuple(state.shape), (0,) * state.dim())


def _load_local_state(contents: Contents, files: ShardFiles, *, same_layout: bool) -> None:
    """Random states of this rank, for as many ranks as there were, and opaque ones, for the same layout."""
    if files.world_size != contents.world.size:
        return
    states: dict[str, dict[str, Tensor]] = {"rng": {}, "backend_rng": {}, "opaque": {}}
    for key in files.names():
        group, _, rest = key.partition("/")
        name, _, rank = rest.rpartition("/")
        if group in states and rank == str(contents.world.rank):
            states[group][name] = files.read(key)
    contents.rng.load(states["rng"])
    if isinstance(contents.backend, SupportsRngState):
        contents.backend.load_rng_state(states["backend_rng"])
    if isinstance(contents.backend, SupportsOpaqueState) and same_layout:
        contents.backend.load_opaque_state(states["opaque"])


def _shard_directory(directory: Path) -> Path:
    shards = directory / SHARDS
    shards.mkdir(exist_ok=True)
    return shards


def _save_hf(contents: Contents, meta: SaveLoadMeta) -> BackgroundSave | None:
    """Safetensors, config, generation config and tokenizer; collective."""
    kinds = contents.tensors.export_kinds("params")

    def write(directory: Path) -> None:
        stream = contents.export(item for kind in kinds for item in contents.tensors.stream(kind))
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
            write_end_tokens(directory, config, ends, model.path)
        else:
            set_padding(directory, config, ends)
            config.save_pretrained(directory)

    config = copy.deepcopy(contents.backend.hf_config())
    config.dtype = contents.config.dtype
    state = {"model": contents.fingerprint(), "version": contents.progress.version}
    return save_files(contents, meta, write, state, lambda: _tensors_later(contents, kinds, write_rest))


def _load_hf(contents: Contents, meta: SaveLoadMeta) -> None:
    """Weights only: progress, and moments if there are some, stay as they are; collective."""
    kinds = contents.tensors.export_kinds("params")
    kind_of = {name: kind for kind in kinds for name in contents.tensors.shapes(kind)}
    with open_checkpoint(meta.path, contents.world, kind="hf", require_manifest=False) as directory:

        def parts() -> Mapping[TensorKind, TensorSource]:
            source = TensorFiles(directory, "model")
            names: dict[TensorKind, dict[str, str]] = {kind: {} for kind in kinds}
            for name in source.names():
                names[kind_of.get(name, "params")][name] = name
            return {kind: MappedSource(source, keys) for kind, keys in names.items()}

        load_tensors(contents, parts, f"cannot load {meta.path!r}")


def _tensors_later(
    contents: Contents, kinds: Sequence[TensorKind], write_rest: Write
) -> DeferredWrite | None:
    """Model files from a snapshot: every rank writes its slices of ``kinds``, and rank 0 joins them.

    ``write_rest`` writes all other files. None where the backend exports by itself, so that only it knows what to copy.
    """
    if isinstance(contents.backend, SupportsOwnExport):
        return None
    rank, size = contents.world.rank, contents.world.size
    shapes = {kind: contents.tensors.shapes(kind) for kind in kinds}
    # Carried tensors never change: they are read from the model's files at the end.
    copies = copy_shards(rank, contents.tensors.shards([kind for kind in kinds if kind != "carried"]))

    def write(directory: Path) -> None:
        parts = directory / PARTS
        parts.mkdir(exist_ok=True)
        write_copies(parts, rank, copies, size)
        copies.clear()

    def finish(directory: Path) -> None:
        parts, carried = ShardFiles(directory / PARTS), contents.tensors.carried

        def read(kind: TensorKind, name: str) -> Tensor:
            return carried.read(name) if kind == "carried" else parts.read(f"{kind}/{name}")

        stream = ((name, read(kind, name)) for kind in kinds for name in shapes[kind])
        write_tensors(directory, "model", stream, writes=True)
        shutil.rmtree(directory / PARTS)
        write_rest(directory)

    return DeferredWrite(write, finish)


SAVE = {"hf": _save_hf, "sharded": _save_sharded, "adapter": save_adapter}
LOAD = {"hf": _load_hf, "sharded": _load_sharded, "adapter": load_adapter}


def save_contents(contents: Contents, meta: SaveLoadMeta) -> BackgroundSave | None:
    """Save ``contents`` in ``meta.format``; collective. Returns the save in the background, if one was asked for.

    Raises one `CheckpointError` on all ranks when anything fails on any of them; the previous checkpoint stays.
    """
    if meta.format == "portable":
        # torch.distributed.checkpoint takes a second to import.
        from core_rl.checkpoint.portable import save_portable

        return save_portable(contents, meta)
    return SAVE[meta.format](contents, meta)


def load_contents(contents: Contents, meta: SaveLoadMeta) -> EngineProgress | None:
    """Load what `save_contents` wrote, or for ``hf`` any model directory of transformers; collective.

    Files, model and names are checked before anything changes. Returns the progress to restore, if any. Raises
    `CheckpointNotFound`, `CheckpointDamaged` or `CheckpointMismatch`, and `WeightsError` for a model directory with
    other tensors; the same on all ranks.
    """
    if meta.format == "portable":
        from core_rl.checkpoint.portable import load_portable

        return load_portable(contents, meta)
    return LOAD[meta.format](contents, meta)
