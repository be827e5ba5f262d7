"""The engines that a session keeps from check to check: groups of ranks, and inference engines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from core_rl.backend.meta import FinetuneSpec
from core_rl.config.capability import Capability
from core_rl.config.engine import InferenceEngineConfig, TrainEngineConfig
from core_rl.engine.inference import InferenceEngine
from core_rl.engine.loading import load_engine
from core_rl.engine.train import TrainEngine
from core_rl.errors import RolloutError
from core_rl.launch.group import EngineGroup
from core_rl.registry.spec import EngineSpec
from core_rl.servers.config import ServerEngineConfig
from core_rl_conformance.outcomes import NotRun

MakeEngine = Callable[[EngineSpec, Any], Any]
"""Makes an inference engine, as `load_engine` does; the suite's own tests plant bugs of the core here."""
CALL_TIMEOUT_S = 120.0
"""No call on a tiny model takes that long, unless a rank hangs."""
MOST_SERVERS = 2
"""Shared servers that run at one time: each takes more than a gigabyte."""


def use_deterministic_kernels(_engine: TrainEngine) -> None:
    """Let torch's kernels add up in one order; other kernels warn, and work as before.

    The backward pass of FlashAttention has another order each time, for which checks of equal bits would fail engines.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)


class GroupPool:
    """One group of ranks for each engine, kept between checks and initialized anew for each of them."""

    def __init__(self, timeout_s: float = CALL_TIMEOUT_S, make: MakeEngine = load_engine) -> None:
        self.timeout_s = timeout_s
        self.make = make
        self.hangs: Counter[tuple[str, str]] = Counter()
        """Number of calls that timed out, by engine and layout."""
        self.starting_s = 0.0
        """Seconds that went into starting processes."""
        self._groups: dict[str, EngineGroup] = {}

    def start(
        self, spec: EngineSpec, config: TrainEngineConfig, ft_spec: FinetuneSpec | None = None
    ) -> EngineGroup:
        """A group of ``spec`` that is initialized with ``config``; its earlier state is gone.

        Raises `NotRun` where this machine has fewer GPUs than ranks.
        """
        if config.device == "cuda":
            ranks = config.layout.world_size
            devices = torch.cuda.device_count()
            if ranks > devices:
                raise NotRun(f"{ranks} ranks need a GPU each, and this machine has {devices}")
        group = self._groups.get(spec.name)
        if group is None or group.spec != spec:
            self.discard(spec.name)
            group = EngineGroup(
                spec, config, timeout_s=self.timeout_s, threads_per_rank=1, make_engine=self.make
            )
            self._groups[spec.name] = group
            self.starting_s += group.starting_s
        before = group.starting_s
        group.initialize(ft_spec, config)
        if config.device == "cuda":
            group.run(use_deterministic_kernels)
        self.starting_s += group.starting_s - before
        return group

    def discard(self, name: str) -> None:
        """End the processes of the engine ``name``; the next `start` begins with new ones."""
        group = self._groups.pop(name, None)
        if group is not None:
            group.close()

    def close(self) -> None:
        for name in list(self._groups):
            self.discard(name)


class ServerPool:
    """One inference engine for each name: a server takes long to start, and serves many checks."""

    def __init__(self, make: MakeEngine = load_engine) -> None:
        self.make = make
        self._engines: dict[str, InferenceEngine] = {}
        self._addresses: dict[str, tuple[str, ...]] = {}
        """Addresses of the servers of each engine that has launched some."""
        self._used_up: set[str] = set()
        self.silent: set[str] = set()
        """Engines over running servers that did not respond, for which each start would wait again."""
        self._shared = _SharedServers(make)

    def start(
        self, spec: EngineSpec, config: InferenceEngineConfig, *, keep: bool = True, shared: bool = False
    ) -> InferenceEngine:
        """An engine of ``spec`` that serves ``config``'s model: the running engine, if it does.

        ``keep=False`` is for a caller that changes its weights: later callers get a new engine. With ``shared``, a new
        engine may find the servers of an earlier one.
        """
        engine = self._engines.get(spec.name)
        if engine is None or engine.config != config or spec.name in self._used_up:
            self._drop(spec.name)
            engine = self._started(spec, config, shared)
        if not keep:
            self._used_up.add(spec.name)
        return engine

    def _started(self, spec: EngineSpec, config: InferenceEngineConfig, shared: bool) -> InferenceEngine:
        engine: InferenceEngine = self.make(spec, config)
        # Stored before it starts: a launched server is ended even if it never gets ready.
        self._engines[spec.name] = engine
        if spec.supports(Capability.LAUNCH_SERVER):
            launched = self._shared.addresses(spec, config) if shared else engine.launch_server()
            self._addresses[spec.name] = launched
        try:
            engine.initialize(self._addresses.get(spec.name), FinetuneSpec())
        except RolloutError:
            if isinstance(config, ServerEngineConfig) and config.options.addresses:
                self.silent.add(spec.name)
            raise
        return engine

    def connect(self, spec: EngineSpec, config: InferenceEngineConfig) -> InferenceEngine:
        """Another engine at the servers that `start` has launched for ``spec``, for the caller to destroy."""
        engine: InferenceEngine = self.make(spec, config)
        engine.initialize(self._addresses[spec.name], FinetuneSpec())
        return engine

    def _drop(self, name: str) -> None:
        self._used_up.discard(name)
        self._addresses.pop(name, None)
        engine = self._engines.pop(name, None)
        if engine is not None:
            engine.destroy()

    def discard(self, name: str) -> None:
        """End the engine ``name`` and its servers; the next `start` makes new ones."""
        self._drop(name)
        self._shared.discard(name)

    def close(self) -> None:
        for name in list(self._engines):
            self.discard(name)


class _SharedServers:
    """Servers by their purpose: an engine's name, its config, and the architecture of the model."""

    def __init__(self, make: MakeEngine) -> None:
        self._make = make
        self._launched: dict[tuple[str, str], tuple[InferenceEngine, tuple[str, ...]]] = {}
        """Ordered by last use. The engines do nothing but own the servers."""

    def addresses(self, spec: EngineSpec, config: InferenceEngineConfig) -> tuple[str, ...]:
        """Addresses of servers for ``config``; started if there are none, after ending others that are too many."""
        key = (spec.name, _architecture(config))
        launched = self._launched.pop(key, None)
        if launched is None:
            while (
                self._launched
                and config.layout.dp + sum(len(a) for _, a in self._launched.values()) > MOST_SERVERS
            ):
                self._end(next(iter(self._launched)))
            owner = self._make(spec, config)
            self._launched[key] = (owner, ())
            launched = (owner, owner.launch_server())
        self._launched[key] = launched
        return launched[1]

    def discard(self, name: str) -> None:
        """End the servers of the engine ``name``."""
        for key in [key for key in self._launched if key[0] == name]:
            self._end(key)

    def _end(self, key: tuple[str, str]) -> None:
        owner, _ = self._launched.pop(key)
        owner.destroy()


def _architecture(config: InferenceEngineConfig) -> str:
    """All of ``config`` and of the model but its weights."""
    assert config.model.path is not None
    files = [Path(config.model.path) / name for name in ("config.json", "generation_config.json")]
    model = config.model.model_copy(update={"path": None})
    return repr(
        [config.model_copy(update={"model": model}), *(file.read_text() for file in files if file.is_file())]
    )
