"""`EngineRanks`: the life of the processes behind an `EngineGroup`, and calls on all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, TypeVarTuple

from core_rl.backend.meta import FinetuneSpec
from core_rl.config.engine import TrainEngineConfig
from core_rl.config.layout import ParallelLayout
from core_rl.distributed.process_group import RankAddress
from core_rl.engine.train import TrainEngine
from core_rl.errors import ConfigError, EngineStateError, GroupError, LayoutError
from core_rl.launch import remote
from core_rl.launch.rank_set import RankSet
from core_rl.registry.engines import get_spec
from core_rl.registry.spec import EngineSpec

__all__ = ["EngineRanks"]

ResultT = TypeVar("ResultT")
ArgTs = TypeVarTuple("ArgTs")

DESTROY_TIMEOUT_S = 60.0
"""How long `EngineRanks.close` waits for the engine before it ends its processes."""


class EngineRanks:
    """Processes that each hold one rank of a train engine. Users take `EngineGroup`, which adds its methods."""

    _seat: int
    _closed: bool

    def __init__(
        self,
        spec: EngineSpec | str,
        config: TrainEngineConfig,
        *,
        timeout_s: float = 600.0,
        threads_per_rank: int | None = None,
        devices: Sequence[int] | None = None,
        beside: EngineRanks | None = None,
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
        if beside is None:
            self._ranks = RankSet(threads_per_rank, devices)
        else:
            self._ranks = _ranks_of(beside, config, threads_per_rank, devices)
        self._take_seat()

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
        size, store = self.world_size, self._ranks.store()
        addresses = [
            RankAddress(
                rank=rank, world_size=size, store_path=store, local_rank=device, timeout_s=self.timeout_s
            )
            for rank, device in enumerate(self._ranks.devices or range(size))
        ]
        try:
            places = self._call("initialize", remote.initialize, [(addr, ft_spec) for addr in addresses])
        except BaseException:
            self._destroy_engine(size)  # on the ranks, if there are any, on which it did not fail
            self._ranks.forget(self._seat)
            raise
        self._ranks.settle(self._seat, places)

    def destroy(self) -> None:
        """Free the engine and keep the processes; `initialize` builds a new one."""
        if places := self._ranks.places(self._seat):
            self._call("destroy", remote.destroy, [()] * len(places))
        self._ranks.forget(self._seat)

    def close(self) -> None:
        """Free the engine, and end the processes unless a group beside this one has them. Further calls do nothing."""
        if self._closed:
            return
        self._ranks.check_free(self._seat)
        try:
            self._destroy_engine(len(self._ranks.places(self._seat)))
        finally:
            self._closed = True
            self._ranks.leave(self, self._seat)

    def restart(self) -> None:
        """Replace the processes, alive or not, by new ones; `initialize` is next.

        Groups that share the processes lose their engines as well, and need `initialize` too.
        """
        self._ranks.restart()
        self._take_seat()

    def _take_seat(self) -> None:
        self._seat = self._ranks.enter(self)
        self._closed = False
        try:
            self._prepare(self.config)
        except BaseException:
            self._closed = True
            self._ranks.leave(self, self._seat, wait_s=0.0)
            raise

    def _prepare(self, config: TrainEngineConfig) -> None:
        size, ranks = config.layout.world_size, self._ranks
        if ranks.devices is not None and len(set(ranks.devices)) != size:
            raise ConfigError(
                f"devices = {list(ranks.devices)} for {size} ranks; name a different one for each rank"
            )
        self._check_open()
        ranks.check_world(self._seat, size)
        ranks.pool.grow(size)
        arguments = (self.spec, config, ranks.threads(size))
        self._call("the check of the config", remote.prepare, [arguments] * size)

    def _destroy_engine(self, ranks: int) -> None:
        """Free what the first ``ranks`` ranks have of the engine, if they can be asked."""
        if ranks and self._ranks.pool.is_idle:
            timeout_s = min(self.timeout_s, DESTROY_TIMEOUT_S)
            self._ranks.pool.call(self._seat, "destroy", remote.destroy, [()] * ranks, timeout_s)

    def _check_open(self) -> None:
        self._ranks.pool.check()
        if self._closed:
            raise GroupError("this group has ended: it was closed. Start a new one, or call restart()")

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
        return self._ranks.pool.pids

    @property
    def starting_s(self) -> float:
        """Seconds that went into starting the processes that are there."""
        return self._ranks.pool.starting_s

    def _ready(self) -> list[remote.Place]:
        """The places of all ranks; raises `EngineStateError` before `initialize`."""
        self._check_open()
        places = self._ranks.places(self._seat)
        if not places:
            raise EngineStateError(f"the group of {self.spec.name!r} has no engine; call initialize() first")
        return places

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
        return self._ranks.pool.call(self._seat, name, fn, per_rank, self.timeout_s)


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", None) or repr(fn)


def _ranks_of(
    beside: EngineRanks, config: TrainEngineConfig, threads: int | None, devices: Sequence[int] | None
) -> RankSet:
    """The processes of ``beside``, for a group with ``config``."""
    if threads is not None or devices is not None:
        raise ConfigError(
            "threads_per_rank and devices are those of the processes, which a group beside another one shares; give "
            "them to the group that starts the processes"
        )
    if config.layout.world_size != beside.world_size:
        raise LayoutError(
            f"layout {config.layout} has {config.layout.world_size} ranks, and the group beside has "
            f"{beside.world_size}; groups share processes only where each has all of them"
        )
    beside._check_open()
    return beside._ranks
