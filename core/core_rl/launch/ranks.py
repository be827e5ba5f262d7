"""`EngineRanks`: the life of the processes behind an `EngineGroup`, and calls on all of them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, TypeVarTuple

from core_rl.config.engine import TrainEngineConfig
from core_rl.config.layout import ParallelLayout
from core_rl.engines.meta import FinetuneSpec, RankAddress
from core_rl.engines.registry import get_spec
from core_rl.engines.spec import EngineSpec
from core_rl.engines.train import TrainEngine
from core_rl.errors import ConfigError, EngineStateError
from core_rl.launch import remote
from core_rl.launch.pool import RankPool

__all__ = ["EngineRanks"]

ResultT = TypeVar("ResultT")
ArgTs = TypeVarTuple("ArgTs")

DESTROY_TIMEOUT_S = 60.0
"""How long `EngineRanks.close` waits for the engines before it ends their processes."""


class EngineRanks:
    """Processes that each hold one rank of a train engine. Users take `EngineGroup`, which adds its methods."""

    def __init__(
        self,
        spec: EngineSpec | str,
        config: TrainEngineConfig,
        *,
        timeout_s: float = 600.0,
        threads_per_rank: int | None = None,
        devices: Sequence[int] | None = None,
    ) -> None:
        self.spec = get_spec(spec) if isinstance(spec, str) else spec
        if self.spec.kind != "train":
            raise ConfigError(
                f"engine {self.spec.name!r} is for {self.spec.kind}; a group drives train engines"
            )
        if not timeout_s > 0:
            raise ConfigError(f"timeout_s = {timeout_s}; it must be positive")
        if threads_per_rank is not None and threads_per_rank < 1:
            raise ConfigError(
                f"threads_per_rank = {threads_per_rank}; it must be positive, or None to share the cores"
            )
        self.config = config
        self.timeout_s = timeout_s
        self._threads_per_rank = threads_per_rank
        self._devices = devices
        self._places: list[remote.Place] = []
        self._meeting: tempfile.TemporaryDirectory[str] | None = None
        self._start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------ life cycle

    def initialize(
        self, ft_spec: FinetuneSpec | None = None, config: TrainEngineConfig | None = None
    ) -> None:
        """Build the engine on every rank; one that was there before is destroyed.

        With another ``config``, perhaps of another layout, the processes stay: a smaller world uses
        the first ranks, and a larger one starts the missing ones. A config that the engine refuses
        changes nothing.
        """
        config = config or self.config
        self._prepare(config)
        self.destroy()
        self.config = config
        # A new file each time: a store serves one process group.
        self._meeting = tempfile.TemporaryDirectory(prefix="core-rl-", ignore_cleanup_errors=True)
        store = str(Path(self._meeting.name) / "store")
        size = self.world_size
        addresses = [
            RankAddress(
                rank=rank, world_size=size, store_path=store, local_rank=device, timeout_s=self.timeout_s
            )
            for rank, device in enumerate(self._devices or range(size))
        ]
        self._places = self._pool.call(
            "initialize", remote.initialize, [(addr, ft_spec) for addr in addresses], self.timeout_s
        )

    def destroy(self) -> None:
        """Free the engines and keep the processes; `initialize` builds new ones."""
        self._destroy_engines(self.timeout_s)
        self._forget()

    def close(self) -> None:
        """Free the engines and end the processes. Further calls of it do nothing."""
        try:
            if self._pool.is_idle:
                self._destroy_engines(min(self.timeout_s, DESTROY_TIMEOUT_S))
        finally:
            self._pool.close()
            self._forget()

    def restart(self) -> None:
        """Replace the processes, alive or not, by new ones; `initialize` is next."""
        self._pool.close(wait_s=0.0)
        self._forget()
        self._start()

    def _start(self) -> None:
        self._pool = RankPool()
        try:
            self._prepare(self.config)
        except BaseException:
            self._pool.close(wait_s=0.0)
            raise

    def _prepare(self, config: TrainEngineConfig) -> None:
        size = config.layout.world_size
        if self._devices is not None and len(set(self._devices)) != size:
            raise ConfigError(
                f"devices = {list(self._devices)} for {size} ranks; name a different one for each rank"
            )
        self._pool.grow(size)
        threads = self._threads_per_rank or max(1, _cores() // size)
        self._pool.call(
            "the check of the config", remote.prepare, [(self.spec, config, threads)] * size, self.timeout_s
        )

    def _destroy_engines(self, timeout_s: float) -> None:
        if self._places:
            self._pool.call("destroy", remote.destroy, [()] * len(self._places), timeout_s)

    def _forget(self) -> None:
        self._places = []
        if self._meeting is not None:
            self._meeting.cleanup()

    # ---------------------------------------------------------------- places

    @property
    def layout(self) -> ParallelLayout:
        """The parallel degrees."""
        return self.config.layout

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.layout.world_size

    @property
    def data_parallel_size(self) -> int:
        """How many parts a batch is split into."""
        return self._ready()[0].data_parallel_size

    @property
    def pids(self) -> list[int]:
        """Process ids in rank order; ranks that a smaller layout leaves idle come last."""
        return self._pool.pids

    @property
    def starting_s(self) -> float:
        """Seconds that went into starting the processes that are there."""
        return self._pool.starting_s

    def _ready(self) -> list[remote.Place]:
        """The places of all ranks; raises `EngineStateError` before `initialize`."""
        if not self._places and self._pool.ended is None:
            raise EngineStateError(f"the group of {self.spec.name!r} has no engine; call initialize() first")
        self._pool.check()
        return self._places

    # -------------------------------------------------------------- any call

    def run(self, fn: Callable[[TrainEngine, *ArgTs], ResultT], *args: *ArgTs) -> list[ResultT]:
        """``fn(engine, *args)`` on every rank at once; the results in rank order.

        ``fn``, ``args`` and the results are pickled by value (the view of a tensor with all of its
        storage). Contexts and generators of an engine are used inside ``fn``. Results on an
        accelerator are to be moved to the CPU in ``fn``.
        """
        return self._call(_name(fn), remote.call_with_engine, [(fn, args)] * len(self._ready()))

    def run_each(
        self, fn: Callable[[TrainEngine, *ArgTs], ResultT], per_rank_args: Sequence[tuple[*ArgTs]]
    ) -> list[ResultT]:
        """``fn(engine, *per_rank_args[rank])`` on every rank at once; the results in rank order."""
        if len(per_rank_args) != len(self._ready()):
            raise ConfigError(
                f"run_each got arguments for {len(per_rank_args)} ranks; the group has {self.world_size}"
            )
        return self._call(_name(fn), remote.call_with_engine, [(fn, args) for args in per_rank_args])

    def _call(self, name: str, fn: Callable[..., Any], per_rank: Sequence[tuple[Any, ...]]) -> list[Any]:
        return self._pool.call(name, fn, per_rank, self.timeout_s)


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", None) or repr(fn)


def _cores() -> int:
    """The CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
