"""``format="sharded"``: each rank's slices, opaque state and random states, and progress."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from core_rl.backend.meta import EngineProgress, SaveLoadMeta
from core_rl.backend.protocols import SupportsOpaqueState, SupportsOwnCheckpoint, SupportsRngState
from core_rl.backend.tensors import MappedSource
from core_rl.checkpoint.background import BackgroundSave, Later
from core_rl.checkpoint.contents import Contents, publish_save
from core_rl.checkpoint.directory import opened
from core_rl.checkpoint.shards import ShardFiles, write_copies
from core_rl.config.capability import Capability
from core_rl.config.layout import ParallelLayout
from core_rl.distributed.agreement import on_all, on_leader
from core_rl.errors import UnsupportedCapability
from core_rl.state.slices import Shard, copy_shards

__all__ = ["load_sharded", "save_sharded"]

DIRECTORY = "shards"


def save_sharded(contents: Contents, meta: SaveLoadMeta) -> BackgroundSave | None:
    """Weights, and where asked moments and random states; collective."""
    with_optimizer = contents.with_moments(meta)
    rank, size = contents.world.rank, contents.world.size
    own = contents.backend if isinstance(contents.backend, SupportsOwnCheckpoint) else None

    def snapshot() -> Later:
        copies = copy_shards(rank, _shards(contents, meta))

        def write_later(directory: Path) -> None:
            write_copies(_inside(directory), rank, copies, size)
            copies.clear()

        return Later(write_later)

    def write(directory: Path) -> None:
        if own is not None:
            own.save_sharded(_inside(directory), with_optimizer)
        snapshot().write(directory)

    state = contents.state(with_optimizer)
    return publish_save(contents, meta, write, state, lambda: snapshot() if own is None else None)


def load_sharded(contents: Contents, meta: SaveLoadMeta) -> EngineProgress | None:
    """Load what the same engine saved; returns its progress where asked. Collective.

    Raises `UnsupportedCapability` before any tensor is read, where it was saved at another layout, and the engine does
    not declare `Capability.RESHARDING`.
    """
    subject = f"cannot load {meta.path!r}"
    with_optimizer = contents.with_moments(meta)
    with opened(meta.path, contents.world, kind="sharded") as directory:
        state = on_all(contents.world, lambda: contents.checked_state(meta, directory), subject)
        saved = ParallelLayout.model_validate(state["layout"])
        _require_layout(contents, meta, saved)
        # Of all ranks, one reads the headers of all files; each then opens those that it needs.
        files = on_leader(contents.world, lambda: ShardFiles(directory / DIRECTORY), subject)
        backend = contents.backend
        if isinstance(backend, SupportsOwnCheckpoint):
            own = backend
            on_all(contents.world, lambda: own.load_sharded(directory / DIRECTORY, with_optimizer), subject)
        else:
            for kind in contents.kinds(meta):
                keys = {name: f"{kind}/{name}" for name in contents.tensors.shapes(kind)}
                contents.tensors.load(kind, MappedSource(files, keys))
        if with_optimizer:
            same = saved == contents.config.layout
            on_all(contents.world, lambda: _load_local_state(contents, files, same_layout=same), subject)
    return EngineProgress(**state["progress"]) if meta.with_optimizer else None


def _require_layout(contents: Contents, meta: SaveLoadMeta, saved: ParallelLayout) -> None:
    own = contents.config.layout
    if saved != own and not contents.resharding:
        raise UnsupportedCapability(
            f"{meta.path!r} was saved at the layout {saved}, and this is {own}: the engine {contents.engine!r} does "
            f"not declare {Capability.RESHARDING.value!r}; load it at {saved}, or save with format='portable'"
        )


def _shards(contents: Contents, meta: SaveLoadMeta) -> Iterator[Shard]:
    """Tensors, unless the backend writes them itself, and where asked this rank's random and opaque states."""
    if not isinstance(contents.backend, SupportsOwnCheckpoint):
        yield from contents.tensors.shards(contents.kinds(meta))
    for name, state in _own_states(contents).items() if contents.with_moments(meta) else ():
        yield Shard(f"{name}/{contents.world.rank}", state, tuple(state.shape), (0,) * state.dim())


def _own_states(contents: Contents) -> dict[str, Tensor]:
    states = {f"rng/{name}": state for name, state in contents.rng.states().items()}
    if isinstance(contents.backend, SupportsRngState):
        states |= {f"backend_rng/{name}": state for name, state in contents.backend.rng_state().items()}
    if isinstance(contents.backend, SupportsOpaqueState):
        states |= {f"opaque/{name}": state for name, state in contents.backend.opaque_state().items()}
    return states


def _load_local_state(contents: Contents, files: ShardFiles, *, same_layout: bool) -> None:
    """Random states of this rank, for as many ranks as there were, and opaque ones, for the same layout."""
    if files.world_size != contents.world.size:
        return
    found: dict[str, dict[str, Tensor]] = {"rng": {}, "backend_rng": {}, "opaque": {}}
    for key in files.names():
        group, _, rest = key.partition("/")
        name, _, rank = rest.rpartition("/")
        if group in found and rank == str(contents.world.rank):
            found[group][name] = files.read(key)
    contents.rng.load(found["rng"])
    if isinstance(contents.backend, SupportsRngState):
        contents.backend.load_rng_state(found["backend_rng"])
    if isinstance(contents.backend, SupportsOpaqueState) and same_layout:
        contents.backend.load_opaque_state(found["opaque"])


def _inside(directory: Path) -> Path:
    shards = directory / DIRECTORY
    shards.mkdir(exist_ok=True)
    return shards
