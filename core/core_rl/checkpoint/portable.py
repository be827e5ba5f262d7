"""``format="portable"``: float32 weights and moments as `torch.distributed.checkpoint` (DCP) writes and reads them.

Weights have the names of the checkpoint, and moments ``optimizer.state.NAME.KIND`` with the step count
``optimizer.state.NAME.step``: the flattened keys of ``torch.distributed.checkpoint.state_dict`` and torchtitan.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from core_rl.backend.meta import EngineProgress, SaveLoadMeta, TensorKind
from core_rl.backend.protocols import SupportsOwnExport
from core_rl.backend.tensors import MappedSource, TensorSource
from core_rl.checkpoint.background import BackgroundSave, DeferredWrite
from core_rl.checkpoint.contents import Contents, load_tensors, save_files
from core_rl.checkpoint.directory import open_checkpoint
from core_rl.checkpoint.manifest import MANIFEST
from core_rl.checkpoint.shards import bounds_of
from core_rl.distributed.agreement import describe, on_all
from core_rl.distributed.comm import Comm
from core_rl.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointMismatch,
    CheckpointNotFound,
    WeightsError,
    raise_all,
)
from core_rl.state.slices import Shard, copy_shards

CLASSES = (
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.filesystem",
    "torch.distributed.checkpoint.storage",
    "pathlib",
)
"""Modules whose classes the pickled metadata may name; see `_Unpickler`."""
METADATA = ".metadata"
"""The file of `torch.distributed.checkpoint` that describes the others."""
MOMENTS = "optimizer.state."
NOT_WEIGHTS = ("optimizer.", "lr_scheduler.", "dataloader.", "train_state.")
"""Keys of torchtitan next to the weights."""
PREFIXES = ("", "model.", "dcp.model.")
"""Prefixes of the weights: none (torchtitan), the key of PyTorch's examples, and the keys of AReaL."""


def save_portable(contents: Contents, meta: SaveLoadMeta) -> BackgroundSave | None:
    """Float32 weights, and where asked moments; each rank writes its slices. Collective."""

    def snapshot() -> DeferredWrite:
        return copy_slices(contents.world, lambda: _shards(contents, meta), lambda: _fixed(contents, meta))

    def write(directory: Path) -> None:
        snapshot().run(directory, contents.world)

    return save_files(contents, meta, write, contents.state(contents.with_moments(meta)), snapshot)


def copy_slices(
    world: Comm, shards: Callable[[], Iterable[Shard]], fixed: Callable[[], Iterable[Shard]] = tuple
) -> DeferredWrite:
    """Copy the slices of all ranks, each of which ``shards`` gives on one rank, and plan their files; collective.

    Those of ``fixed`` never change, and are not copied. Raises one `CheckpointError` on all ranks when anything fails
    on any of them.
    """
    rank, size = world.rank, world.size
    subject = "the files of torch.distributed.checkpoint"
    planner = on_all(
        world, lambda: _Slices([*copy_shards(rank, shards()), *fixed()]), subject, CheckpointError
    )
    # Each rank makes the plan of all ranks, which is the same everywhere.
    plans, metadata = planner.create_global_plan(world.gather(planner.create_local_plan()))

    def write(directory: Path) -> None:
        # Flushed with the manifest. On the CPU already: a stream of this thread would be on the first GPU.
        writer = FileSystemWriter(directory, sync_files=False, per_thread_copy_ahead=0)
        results = writer.write_data(writer.prepare_global_plan(plans)[rank], planner).value()
        planner.shards.clear()
        _results_file(directory, rank).write_bytes(pickle.dumps(results))

    def finish(directory: Path) -> None:
        files = [_results_file(directory, rank) for rank in range(size)]
        FileSystemWriter(directory, sync_files=False).finish(metadata, [_unpickle(file) for file in files])
        for file in files:
            file.unlink()

    return DeferredWrite(write, finish, f"__{rank}_*.distcp")


def _results_file(directory: Path, rank: int) -> Path:
    """Sizes and places of what ``rank`` wrote, which the metadata collects."""
    return directory / f".results-{rank:05d}"


class _Slices(DefaultSavePlanner):
    """Plans to write slices, with DCP's own check that they tile each tensor."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        super().__init__()
        # DCP takes no slice without elements, unless it is the tensor.
        self.shards = {
            MetadataIndex(shard.name, shard.offsets): shard
            for shard in shards
            if shard.tensor.numel() or not math.prod(shard.global_shape)
        }

    def create_local_plan(self) -> SavePlan:
        items = []
        for index, shard in self.shards.items():
            chunk = ChunkStorageMetadata(torch.Size(shard.offsets), shard.tensor.shape)
            properties = TensorProperties.create_from_tensor(shard.tensor)
            data = TensorWriteData(chunk, properties, torch.Size(shard.global_shape))
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        return SavePlan(items, planner_data={index.fqn: _path(index.fqn) for index in self.shards})

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self.shards[write_item.index].tensor


def _path(key: str) -> tuple[str, ...]:
    """The path of ``key`` in the nested state dict: the optimizer's state is a dict of its own."""
    first, _, rest = key.partition(".")
    return (first, rest) if first == "optimizer" else (key,)


def load_portable(contents: Contents, meta: SaveLoadMeta) -> EngineProgress | None:
    """Weights, and where asked moments; returns the progress where asked. Collective.

    Of a directory without a manifest, which another program wrote, the weights alone.
    """
    subject = f"cannot load {meta.path!r}"
    with open_checkpoint(meta.path, contents.world, kind="portable", require_manifest=False) as directory:
        state = on_all(contents.world, lambda: _checked_state(contents, meta, directory), subject)
        load_tensors(contents, lambda: _sources(contents, meta, DcpFiles(directory)), subject)
    return EngineProgress(**state["progress"]) if meta.with_optimizer and state else None


def _checked_state(contents: Contents, meta: SaveLoadMeta, directory: Path) -> Mapping[str, Any]:
    """The state in the manifest; empty without a manifest."""
    if (directory / MANIFEST).is_file():
        return contents.checked_state(meta, directory)
    if contents.with_moments(meta):
        raise CheckpointMismatch(
            f"it has no {MANIFEST}, so it is of another program, and its optimizer state has no counters of core-rl; "
            "load with with_optimizer=False for the weights alone"
        )
    return {}


def _shards(contents: Contents, meta: SaveLoadMeta) -> Iterator[Shard]:
    """This rank's slices under the keys of DCP."""
    tensors, stored = contents.tensors, [kind for kind in contents.kinds(meta) if kind != "carried"]
    exported = isinstance(contents.backend, SupportsOwnExport)
    for shard in _streamed(contents, stored) if exported else tensors.shards(stored):
        kind, _, name = shard.name.partition("/")
        moment = kind in tensors.optimizer_kinds
        yield replace(shard, name=f"{MOMENTS}{name}.{kind}" if moment else name)


def _fixed(contents: Contents, meta: SaveLoadMeta) -> Iterator[Shard]:
    """The writer's carried tensors, in the pages of their files, and step counts."""
    tensors, kinds = contents.tensors, contents.kinds(meta)
    if not contents.is_writer:
        return
    full = {name: tensors.carried.read(name) for name in tensors.shapes("carried")}
    trained = {name for kind in kinds if kind in tensors.optimizer_kinds for name in tensors.shapes(kind)}
    # As torch.optim counts: one number for each parameter.
    full |= {
        f"{MOMENTS}{name}.step": torch.tensor(float(contents.progress.updates)) for name in sorted(trained)
    }
    for key, value in full.items():
        yield _whole(key, value)


def _streamed(contents: Contents, kinds: Iterable[TensorKind]) -> Iterator[Shard]:
    """Full tensors that a backend exports by itself, all of them on the writer; collective.

    Raises `CheckpointError` at the end of the stream for a name that comes twice, or without data.
    """
    names, problems = set[str](), list[str]()
    for kind in kinds:
        for name, value in contents.tensors.stream(kind):
            key = f"{kind}/{name}"
            if key in names:
                problems.append(f"{name!r} twice")
            elif value is not None:
                yield _whole(key, value)
            elif contents.is_writer:
                problems.append(f"no data for {name!r} on the rank that writes")
            names.add(key)
    raise_all(CheckpointError, "the export gave", problems)


def _whole(name: str, value: Tensor) -> Shard:
    return Shard(name, value, tuple(value.shape), (0,) * value.dim())


def kind_and_name(key: str) -> tuple[TensorKind, str]:
    """Kind of moment and name of the parameter in ``key``; all that is no moment counts as ``master``."""
    if not key.startswith(MOMENTS):
        return "master", key
    name, _, kind = key.removeprefix(MOMENTS).rpartition(".")
    return kind, name


def _sources(contents: Contents, meta: SaveLoadMeta, files: DcpFiles) -> Mapping[TensorKind, TensorSource]:
    """The tensors of each kind; tensors of an unknown name count as weights, and the check reports them."""
    kinds, tensors = contents.kinds(meta), contents.tensors
    names: dict[TensorKind, dict[str, str]] = {kind: {} for kind in kinds}
    weights = {
        name: kind for kind in kinds if kind not in tensors.optimizer_kinds for name in tensors.shapes(kind)
    }
    keys = set(files.names())
    prefix = next((prefix for prefix in PREFIXES if any(prefix + name in keys for name in weights)), "")
    for key in files.names():
        kind, name = kind_and_name(key)
        if kind in tensors.optimizer_kinds and kind in names:
            names[kind][name] = key
        elif key.startswith(prefix) and not key.startswith(NOT_WEIGHTS):
            name = key.removeprefix(prefix)
            names[weights.get(name, "master")][name] = key
    return {kind: MappedSource(files, keys_of_kind) for kind, keys_of_kind in names.items()}


class DcpFiles:
    """A `TensorSource` over a directory of `torch.distributed.checkpoint`, by any program; other objects are ignored.

    Raises `CheckpointNotFound` if there is no such directory. Raises `CheckpointDamaged` for a file that is missing or
    cannot be read, and for a region that the files do not cover.
    """

    def __init__(self, directory: Path) -> None:
        self._reader = FileSystemReader(directory)
        metadata = _read_metadata(directory / METADATA)
        self._reader.set_up_storage_reader(metadata, is_coordinator=False)
        entries = metadata.state_dict_metadata.items()
        self._tensors = {key: entry for key, entry in entries if isinstance(entry, TensorStorageMetadata)}

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._tensors:
            raise WeightsError(f"the directory holds no tensor {name!r}")
        return tuple(self._tensors[name].size)

    def read(self, name: str, slices: tuple[slice, ...] | None = None) -> Tensor:
        """The tensor ``name`` on the CPU, or the part of it that ``slices`` names, one for each dimension."""
        bounds, entry = bounds_of(slices or (), self.shape(name)), self._tensors[name]
        offsets = torch.Size([start for start, _ in bounds])
        region = torch.empty([stop - start for start, stop in bounds], dtype=entry.properties.dtype)
        if not region.numel():
            return region
        items = create_read_items_for_chunk_list(name, entry, [ChunkStorageMetadata(offsets, region.shape)])
        missing = region.numel() - sum(math.prod(item.lengths) for item in items)
        if missing:
            raise CheckpointDamaged(
                f"the files lack {missing} of the elements {bounds} of the tensor {name!r}"
            )
        try:
            self._reader.read_data(LoadPlan(items), _Region(region)).wait()
        except (EOFError, KeyError, OSError, RuntimeError, pickle.UnpicklingError) as error:
            raise CheckpointDamaged(f"the tensor {name!r} cannot be read: {describe(error)}") from error
        return region


class _Region(DefaultLoadPlanner):
    """Reads into one tensor."""

    def __init__(self, region: Tensor) -> None:
        super().__init__()
        self._region = region

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._region


def _read_metadata(file: Path) -> Metadata:
    try:
        metadata = _unpickle(file)
    except FileNotFoundError as error:
        raise CheckpointNotFound(
            f"there is no {METADATA}: torch.distributed.checkpoint has not written it"
        ) from error
    except (AttributeError, EOFError, ImportError, ValueError, TypeError, pickle.UnpicklingError) as error:
        raise CheckpointDamaged(f"{METADATA}: {describe(error)}") from error
    if not isinstance(metadata, Metadata):
        raise CheckpointDamaged(
            f"{METADATA} holds a {type(metadata).__name__}, not the metadata of a checkpoint"
        )
    return metadata


def _unpickle(file: Path) -> Any:
    with file.open("rb") as stream:
        return _Unpickler(stream).load()


class _Unpickler(pickle.Unpickler):
    """Builds the data classes of the metadata and nothing else: a pickle from elsewhere may name any function."""

    def find_class(self, module: str, name: str) -> Any:
        plain = "." not in name  # a dotted name reaches into another module
        if plain and module.startswith(CLASSES):
            value = super().find_class(module, name)
            if isinstance(value, type) and value.__module__.startswith(CLASSES):
                return value
        if plain and module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) in (("torch", "Size"), ("torch.serialization", "_get_layout")):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of such metadata")
