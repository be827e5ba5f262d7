"""`EngineRanks`: life cycle of the processes behind an `EngineGroup`, and calls on all of them."""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Self, TypeVar, TypeVarTuple

from core_rl.backend.meta import FinetuneSpec
from core_rl.config.base import parse_config
from core_rl.config.engine import DType, ModelConfig, OptimizerConfig, TrainEngineConfig
from core_rl.config.hub import with_local_model
from core_rl.config.layout import ParallelLayout
from core_rl.distributed.process_group import RankAddress, StoreAddress, require_single_process
from core_rl.engine.loading import load_engine
from core_rl.engine.train import TrainEngine
from core_rl.errors import ConfigError, EngineStateError, GroupError, LayoutError
from core_rl.launch.hosts import EXIT_WAIT_S, Hosts, LocalHosts, Slot
from core_rl.launch.messages import Call
from core_rl.launch.pool import RankPool
from core_rl.launch.process import start_fork_server
from core_rl.launch.remote import MakeEngine, RankInfo
from core_rl.registry.engines import get_spec, load_class
from core_rl.registry.spec import EngineSpec


class RankSet:
    """Rank processes, the groups that use them, and the one world of the groups' engines.

    Each group has an engine id, under which the processes keep its engine.
    """

    def __init__(
        self,
        hosts: Hosts,
        machines: Sequence[int] | None,
        devices: Sequence[int] | None,
        threads_per_rank: int | None,
    ) -> None:
        self.threads_per_rank = threads_per_rank
        self._hosts, self._machines, self._devices = hosts, machines, devices
        self.pool = RankPool(hosts)
        self._engine_ids = itertools.count()
        self._worlds = itertools.count()
        self._engines: dict[int, list[RankInfo]] = {}
        """For each registered group the ranks of its engine, none while it has no engine."""
        self._store_port: int | None = None
        """Port of the first rank's store."""
        self._store: StoreAddress | None = None

    def register(self, group: object) -> int:
        """A new engine id, which keeps the processes until `release`, or until ``group`` is collected."""
        engine_id = next(self._engine_ids)
        self._engines[engine_id] = []
        weakref.finalize(group, self._engines.pop, engine_id, None).atexit = False
        return engine_id

    def release(self, engine_id: int, wait_s: float = EXIT_WAIT_S) -> None:
        """End the processes if no other group is registered, or if the group of ``engine_id`` is in a call.

        Raises `GroupError` while another group is in a call. Further calls do nothing.
        """
        if engine_id not in self._engines:
            return
        caller = self.pool.caller
        if len(self._engines) > 1 and caller not in (None, engine_id):
            raise GroupError(
                "a group that is colocated with this one is in a call; close this one afterwards"
            )
        self.set_engine(engine_id, [])
        self._engines.pop(engine_id, None)
        if not self._engines or caller == engine_id:
            self.pool.close(wait_s)

    def restart(self, engine_id: int) -> None:
        """Replace the processes by new ones, without engines; a group that was released is registered again."""
        self.pool.close(wait_s=0.0)
        self.pool = RankPool(self._hosts)
        self._store_port = None
        self._engines[engine_id] = []
        for colocated in self._engines:
            self.set_engine(colocated, [])

    def check_open(self, engine_id: int) -> None:
        """Raise `GroupError` if the processes are gone, or the group was closed."""
        self.pool.check()
        if engine_id not in self._engines:
            raise GroupError("this group has ended: it was closed. Start a new one, or call restart()")

    # ---------------------------------------------------------------- places

    def slots(self, count: int) -> list[Slot]:
        """The places of ``count`` ranks, of which the first stay theirs when there are more; raises `ConfigError`."""
        return self._hosts.slots(count, self._machines, self._devices)

    def preload(self, modules: Sequence[str]) -> None:
        """Have ranks of the driver's machine inherit ``modules``, if they are the first of the program."""
        if self._hosts.driver_address is None:
            start_fork_server(modules)

    def threads(self, slots: Sequence[Slot]) -> list[int]:
        """Threads of each rank: ``threads_per_rank``, or its share of the cores of its machine."""
        if self.threads_per_rank is not None:
            return [self.threads_per_rank] * len(slots)
        neighbours = Counter(slot.machine for slot in slots)
        return [max(1, self._hosts.cores(slot.machine) // neighbours[slot.machine]) for slot in slots]

    # --------------------------------------------------------------- engines

    def engine(self, engine_id: int) -> list[RankInfo]:
        """The ranks of an engine; empty unless it is initialized."""
        return self._engines.get(engine_id, [])

    def ready_engine(self, engine_id: int, name: str) -> list[RankInfo]:
        """The ranks of an engine; raises `GroupError` after the end, and `EngineStateError` before `initialize`."""
        self.check_open(engine_id)
        if not (ranks := self._engines[engine_id]):
            raise EngineStateError(f"the group of {name!r} has no engine; call initialize() first")
        return ranks

    def set_engine(self, engine_id: int, ranks: list[RankInfo]) -> None:
        """Record the ranks of an engine that has joined the world; an empty list for an engine that left it."""
        if engine_id in self._engines:
            self._engines[engine_id] = ranks
        if not any(self._engines.values()):
            self._store = None

    def check_world(self, engine_id: int, size: int) -> None:
        """Raise `EngineStateError` unless the engine can have a world of ``size`` ranks."""
        sizes = {len(ranks) for other_id, ranks in self._engines.items() if ranks and other_id != engine_id}
        if sizes - {size}:
            raise EngineStateError(
                f"this engine needs {size} ranks, and the colocated engine has {sizes.pop()}; destroy() "
                "that one first, or start this group without colocate_with"
            )

    def store(self, engine_id: int, machine: int, timeout_s: float) -> StoreAddress:
        """Rendezvous of the present world, or of a new world, on the first rank's ``machine``."""
        host = self._hosts.address_of(machine)
        if self._store_port is None:
            (self._store_port,) = self.pool.call(Call(engine_id, "open_store", (host,)), [()], timeout_s)
        if self._store is None:
            self._store = StoreAddress(host=host, port=self._store_port, name=f"world {next(self._worlds)}")
        return self._store


ResultT = TypeVar("ResultT")
ArgTs = TypeVarTuple("ArgTs")
Section = Mapping[str, object]
"""Fields of a part of a config, as in a YAML file."""

SINGLE = "Start the script once, without the launcher: the group starts the ranks by itself"
DESTROY_TIMEOUT_S = 60.0
"""Seconds that `EngineRanks.close` waits for the engine before it ends the processes."""


class EngineRanks:
    """Processes that each hold one rank of a train engine. Users take `EngineGroup`, which adds its methods."""

    def __init__(  # noqa: PLR0913  (the fields of a config, by name)
        self,
        engine: EngineSpec | str,
        config: TrainEngineConfig | None = None,
        *,
        model: ModelConfig | Section | None = None,
        layout: ParallelLayout | Section | None = None,
        optimizer: OptimizerConfig | Section | Literal["default"] | None = "default",
        dtype: DType | None = None,
        device: Literal["auto", "cpu", "cuda"] | None = None,
        seed: int | None = None,
        options: Section | None = None,
        ft_spec: FinetuneSpec | None = None,
        timeout_s: float = 600.0,
        threads_per_rank: int | None = None,
        hosts: Hosts | None = None,
        machines: Sequence[int] | None = None,
        devices: Sequence[int] | None = None,
        colocate_with: EngineRanks | None = None,
        make_engine: MakeEngine = load_engine,
    ) -> None:
        self.spec = get_spec(engine) if isinstance(engine, str) else engine
        if hosts is None or isinstance(hosts, LocalHosts):  # Ray starts drivers inside of a launcher's step
            require_single_process("an EngineGroup", SINGLE)
        _check(self.spec, timeout_s, threads_per_rank)
        sections: dict[str, object] = {"model": model, "layout": layout, "options": options}
        scalars: dict[str, object] = {"dtype": dtype, "device": device, "seed": seed}
        fields = {name: value for name, value in (sections | scalars).items() if value is not None}
        if optimizer != "default":
            fields["optimizer"] = optimizer
        self.config = _config(self.spec, config, fields)
        self.timeout_s = timeout_s
        self._ft_spec = ft_spec
        self._make_engine = make_engine
        if colocate_with is None:
            self.rank_set = RankSet(hosts or LocalHosts(), machines, devices, threads_per_rank)
        else:
            of_processes = (hosts, machines, devices, threads_per_rank)
            if any(value is not None for value in of_processes):
                raise ConfigError(
                    "hosts, machines, devices and threads_per_rank belong to the processes, which colocated groups "
                    "share; give them to the group that starts the processes"
                )
            self.rank_set = colocate_with._shared_ranks(self.config)
        self.engine_id = self.rank_set.register(self)
        """Number of this group's engine in the shared processes."""
        self._start()

    def __enter__(self) -> Self:
        if not self.rank_set.engine(self.engine_id):
            try:
                self.initialize()
            except BaseException:
                self.close()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------ life cycle

    def initialize(
        self, ft_spec: FinetuneSpec | None = None, config: TrainEngineConfig | None = None
    ) -> None:
        """Build the engine on every rank; an engine that exists is destroyed before.

        Entering the group's context does so, with the ``ft_spec`` of the constructor. With another
        ``config``, also of another layout, the processes stay: a smaller world uses the first ranks, and a
        larger one starts the missing ones. A config that the engine refuses changes nothing.
        """
        config = self._prepare(config or self.config)
        self.destroy()
        self.config = config
        size, timeout_s = self.world_size, self.timeout_s
        slots = self.rank_set.slots(size)
        store = self.rank_set.store(self.engine_id, slots[0].machine, timeout_s)
        addresses = [
            RankAddress(rank=rank, world_size=size, store=store, local_rank=slot.device, timeout_s=timeout_s)
            for rank, slot in enumerate(slots)
        ]
        try:
            infos = self._call("initialize", [(address,) for address in addresses], ft_spec or self._ft_spec)
        except BaseException:
            self._destroy_if_idle(size)  # it may have failed on some ranks only
            self.rank_set.set_engine(self.engine_id, [])
            raise
        self.rank_set.set_engine(self.engine_id, infos)

    def destroy(self) -> None:
        """Free the engine and keep the processes; `initialize` builds a new one."""
        if infos := self.rank_set.engine(self.engine_id):
            self._call("destroy", [()] * len(infos))
        self.rank_set.set_engine(self.engine_id, [])

    def close(self) -> None:
        """Free the engine; the last of colocated groups ends the processes. Further calls do nothing."""
        try:
            self._destroy_if_idle(len(self.rank_set.engine(self.engine_id)))
        finally:
            self.rank_set.release(self.engine_id)

    def restart(self) -> None:
        """Replace the processes, alive or not, by new ones; `initialize` is next.

        Colocated groups lose their engines as well, and need `initialize` too.
        """
        self.rank_set.restart(self.engine_id)
        self._start()

    def _start(self) -> None:
        try:
            self.config = self._prepare(self.config)
        except BaseException:
            self.rank_set.release(self.engine_id, wait_s=0.0)
            raise

    def _prepare(self, config: TrainEngineConfig) -> TrainEngineConfig:
        """Start missing ranks and have all check ``config``; returns it with the directory of its model."""
        size, ranks = config.layout.world_size, self.rank_set
        slots = ranks.slots(size)
        self.rank_set.check_open(self.engine_id)
        ranks.check_world(self.engine_id, size)
        config = with_local_model(config)
        ranks.preload(self.spec.preload)
        ranks.pool.grow(slots)
        threads = ranks.threads(slots)
        self._call("prepare", [(count,) for count in threads], self._make_engine, self.spec, config)
        return config

    def _shared_ranks(self, config: TrainEngineConfig) -> RankSet:
        """The processes, for a colocated group with ``config``."""
        if config.layout.world_size != self.world_size:
            raise LayoutError(
                f"layout {config.layout} has {config.layout.world_size} ranks, and the colocated group has "
                f"{self.world_size}; groups share processes only where each has all of them"
            )
        self.rank_set.check_open(self.engine_id)
        return self.rank_set

    def _destroy_if_idle(self, size: int) -> None:
        """Free the engine on the first ``size`` ranks, if they wait for a call."""
        if size and self.rank_set.pool.is_idle:
            timeout_s = min(self.timeout_s, DESTROY_TIMEOUT_S)
            self.rank_set.pool.call(Call(self.engine_id, "destroy"), [()] * size, timeout_s)

    # ----------------------------------------------------------------- ranks

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
        """Number of parts that a batch is split into."""
        return self.rank_infos()[0].data_parallel_size

    @property
    def pids(self) -> list[int]:
        """Process ids in rank order; ranks that a smaller layout leaves idle come last."""
        return self.rank_set.pool.pids

    @property
    def starting_s(self) -> float:
        """Seconds that the start of the present processes took."""
        return self.rank_set.pool.starting_s

    def rank_infos(self) -> list[RankInfo]:
        """Coordinates of all ranks; raises `EngineStateError` before `initialize`."""
        return self.rank_set.ready_engine(self.engine_id, self.spec.name)

    # ----------------------------------------------------------------- calls

    def run(self, fn: Callable[[TrainEngine, *ArgTs], ResultT], *args: *ArgTs) -> list[ResultT]:
        """``fn(engine, *args)`` on every rank at once; the results in rank order.

        ``fn``, ``args`` and the results are pickled by value: tensors that share memory do so no longer. Contexts and
        generators of an engine are used inside ``fn``, which moves results on an accelerator to the CPU.
        """
        return self.run_each(fn, [args] * len(self.rank_infos()))

    def run_each(
        self, fn: Callable[[TrainEngine, *ArgTs], ResultT], per_rank_args: Sequence[tuple[*ArgTs]]
    ) -> list[ResultT]:
        """``fn(engine, *per_rank_args[rank])`` on every rank at once; the results in rank order."""
        if len(per_rank_args) != len(self.rank_infos()):
            raise ConfigError(
                f"run_each got arguments for {len(per_rank_args)} ranks; the group has {self.world_size}"
            )
        packs = {id(args): (args,) for args in per_rank_args}  # the pool sends an equal tuple once
        return self._call("run", [packs[id(args)] for args in per_rank_args], fn)

    def call_ranks(self, method: str, *arguments: object) -> list[Any]:
        """The engine's ``method(*arguments)`` on every rank at once; the results in rank order."""
        return self._call(method, [()] * len(self.rank_infos()), *arguments)

    def _call(self, method: str, per_rank: Sequence[tuple[object, ...]], *arguments: object) -> list[Any]:
        """``method(*per_rank[rank], *arguments)`` on every rank; see `Call`."""
        return self.rank_set.pool.call(Call(self.engine_id, method, arguments), per_rank, self.timeout_s)


def _config(
    spec: EngineSpec, config: TrainEngineConfig | None, fields: Mapping[str, object]
) -> TrainEngineConfig:
    """``config``, or a config of the engine's class with ``fields``."""
    if config is not None and fields:
        raise ConfigError(
            f"a config and its fields ({', '.join(fields)}) for {spec.name!r}; give either, or put the fields into "
            "the config"
        )
    return config or parse_config(
        load_class(spec, "config", TrainEngineConfig), fields, f"the config of {spec.name!r}"
    )


def _check(spec: EngineSpec, timeout_s: float, threads_per_rank: int | None) -> None:
    if spec.kind != "train":
        raise ConfigError(f"engine {spec.name!r} is for {spec.kind}; a group drives train engines")
    if not timeout_s > 0:
        raise ConfigError(f"timeout_s = {timeout_s}; it must be positive")
    if threads_per_rank is not None and threads_per_rank < 1:
        raise ConfigError(
            f"threads_per_rank = {threads_per_rank}; it must be positive, or None to share the cores"
        )
