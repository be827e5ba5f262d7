"""`HeldCheckpoint`: sharded checkpoints and snapshots of what the ranks hold of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from core_rl.backend.meta import TensorKind
from core_rl.backend.named_tensors import TensorSource
from core_rl.checkpoint.shards import Shard, ShardFiles, copy_shards, write_copies, write_shards
from core_rl.toolkit.held_tensors import HeldTensors

__all__ = ["HeldCheckpoint"]


class HeldCheckpoint(HeldTensors):
    """The hooks of checkpoints: each rank writes and copies the parts that it holds."""

    def _save_shards(self, directory: Path, with_optimizer: bool) -> None:
        write_shards(directory, self.world.rank, self._shards(with_optimizer), self.world.size)

    def _snapshot_shards(self, with_optimizer: bool) -> Callable[[Path], None]:
        copies = copy_shards(self.world.rank, self._shards(with_optimizer))
        return partial(write_copies, rank=self.world.rank, copies=copies, world_size=self.world.size)

    def _snapshot_tensors(self, kinds: Sequence[TensorKind]) -> list[Shard] | None:
        if any(self._held_shapes(kind) != self._tensor_shapes(kind) for kind in kinds):
            return None  # tensors that are written in another form than they are held in
        return copy_shards(self.world.rank, (part for kind in kinds for part in self._exported_parts(kind)))

    def _exported_parts(self, kind: TensorKind) -> Iterator[Shard]:
        """This rank's parts in the dtype in which ``kind`` is exported; of copies, one rank has them."""
        shapes = self._held_shapes(kind)
        for name, part in self._held(kind):
            if self.world.rank == (0 if kind == "buffers" else min(self._holders[name])):
                tensor = self._in_export_dtype(kind, name, part.tensor)
                yield Shard(f"{kind}/{name}", tensor, shapes[name], part.offsets)

    def _shards(self, with_optimizer: bool) -> Iterator[Shard]:
        kinds: tuple[TensorKind, ...] = ("master", "exp_avg", "exp_avg_sq", "buffers")
        for kind in kinds if with_optimizer else ("master", "buffers"):
            yield from self._exported_parts(kind)
        if with_optimizer:
            yield from self._random_state()

    def _random_state(self) -> Iterator[Shard]:
        state = torch.get_rng_state()
        yield Shard(self._rng_name(self.world.rank), state, tuple(state.shape), (0,))
        if self.device.type == "cuda":
            state = torch.cuda.get_rng_state(self.device)
            yield Shard(self._rng_name(self.world.rank, "cuda"), state, tuple(state.shape), (0,))

    def _load_shards(self, directory: Path, with_optimizer: bool) -> None:
        files = ShardFiles(directory)
        self._load_held("master", _Prefixed(files, "master/"))
        self._load_held("buffers", _Prefixed(files, "buffers/"))
        if with_optimizer:
            self._load_held("exp_avg", _Prefixed(files, "exp_avg/"))
            self._load_held("exp_avg_sq", _Prefixed(files, "exp_avg_sq/"))
            self._load_random_state(files)

    def _load_random_state(self, files: ShardFiles) -> None:
        # It goes on exactly only where the number of ranks is the same.
        last, none = self._rng_name(self.world.size - 1), self._rng_name(self.world.size)
        if last not in files.names() or none in files.names():
            return
        torch.set_rng_state(files.read(self._rng_name(self.world.rank)))
        own = self._rng_name(self.world.rank, "cuda")
        if self.device.type == "cuda" and own in files.names():
            torch.cuda.set_rng_state(files.read(own), self.device)

    @staticmethod
    def _rng_name(rank: int, device: str = "cpu") -> str:
        return f"rng/{device}/{rank}"


class _Prefixed:
    """The part of a source whose names begin with ``prefix``, without it."""

    def __init__(self, source: TensorSource, prefix: str) -> None:
        self._source = source
        self._prefix = prefix

    def names(self) -> list[str]:
        return [n.removeprefix(self._prefix) for n in self._source.names() if n.startswith(self._prefix)]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(self._prefix + name)

    def read(self, name: str, slices: tuple[slice, ...] | None = None) -> Tensor:
        return self._source.read(self._prefix + name, slices)
