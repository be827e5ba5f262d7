"""Files of `torch.distributed.checkpoint`: written slice by slice, and read by any rank of any layout."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterable, Sequence
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

from core_rl.checkpoint.shards import bounds_of
from core_rl.distributed.agreement import describe, on_all
from core_rl.distributed.comm import Comm
from core_rl.errors import CheckpointDamaged, CheckpointError, CheckpointNotFound, WeightsError
from core_rl.state.slices import Shard, copy_shards

METADATA = ".metadata"
CLASSES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem", "pathlib")
"""Modules whose classes the pickled metadata may name; see `_Unpickler`."""


def write_slices(directory: Path, world: Comm, shards: Callable[[], Iterable[Shard]]) -> None:
    """Write the slices of all ranks, each of which ``shards`` gives on one rank; collective.

    Raises one `CheckpointError` on all ranks when anything fails on any of them.
    """
    subject = "the files of torch.distributed.checkpoint"
    rank = world.rank
    planner = on_all(world, lambda: _Slices(copy_shards(rank, shards())), subject, CheckpointError)
    writer = FileSystemWriter(directory, sync_files=False)  # flushed with the manifest
    # Each rank makes the plan of all ranks, which is the same everywhere.
    plans, metadata = planner.create_global_plan(world.gather(planner.create_local_plan()))
    plan = writer.prepare_global_plan(plans)[rank]
    written = on_all(world, lambda: writer.write_data(plan, planner).value(), subject, CheckpointError)
    results = world.gather(written)
    if rank == 0:
        writer.finish(metadata, results)


class _Slices(DefaultSavePlanner):
    """Plans to write slices, with DCP's own check that they tile each tensor."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        super().__init__()
        # DCP takes no slice without elements, unless it is the tensor.
        self._shards = {
            MetadataIndex(shard.name, shard.offsets): shard
            for shard in shards
            if shard.tensor.numel() or not math.prod(shard.global_shape)
        }

    def create_local_plan(self) -> SavePlan:
        items = [_write_item(index, shard) for index, shard in self._shards.items()]
        return SavePlan(items, planner_data={index.fqn: _path(index.fqn) for index in self._shards})

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._shards[write_item.index].tensor


def _path(key: str) -> tuple[str, ...]:
    """The path of ``key`` in the nested state dict: the optimizer's state is a dict of its own."""
    first, _, rest = key.partition(".")
    return (first, rest) if first == "optimizer" else (key,)


def _write_item(index: MetadataIndex, shard: Shard) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(shard.offsets), shard.tensor.shape)
    properties = TensorProperties.create_from_tensor(shard.tensor)
    data = TensorWriteData(chunk, properties, torch.Size(shard.global_shape))
    return WriteItem(index, WriteItemType.SHARD, tensor_data=data)


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
        """All keys of tensors."""
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """The full shape of ``name``."""
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
        with file.open("rb") as stream:
            metadata = _Unpickler(stream).load()
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
