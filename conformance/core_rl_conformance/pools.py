"""The engines that a session keeps from check to check: groups of ranks, and inference engines."""

from __future__ import annotations

from collections import Counter

from core_rl.config.engine import InferenceEngineConfig, TrainEngineConfig
from core_rl.engines.inference import InferenceEngine
from core_rl.engines.meta import FinetuneSpec
from core_rl.engines.registry import load_engine
from core_rl.engines.spec import Capability, EngineSpec
from core_rl.launch.group import EngineGroup

__all__ = ["CALL_TIMEOUT_S", "GroupPool", "ServerPool"]

CALL_TIMEOUT_S = 120.0
"""No call on a tiny model takes that long, unless a rank hangs."""


class GroupPool:
    """One group of ranks for each engine, kept between checks and initialized anew for each of them."""

    def __init__(self, timeout_s: float = CALL_TIMEOUT_S) -> None:
        self.timeout_s = timeout_s
        self.hangs: Counter[tuple[str, str]] = Counter()
        """How often a call timed out, by engine and layout."""
        self.starting_s = 0.0
        """Seconds that went into starting processes."""
        self._groups: dict[str, EngineGroup] = {}

    def start(
        self, spec: EngineSpec, config: TrainEngineConfig, ft_spec: FinetuneSpec | None = None
    ) -> EngineGroup:
        """A group of ``spec`` that is initialized with ``config``; what it held before is gone."""
        group = self._groups.get(spec.name)
        if group is None or group.spec != spec:
            self.discard(spec.name)
            group = EngineGroup(spec, config, timeout_s=self.timeout_s, threads_per_rank=1)
            self._groups[spec.name] = group
            self.starting_s += group.starting_s
        before = group.starting_s
        group.initialize(ft_spec, config)
        self.starting_s += group.starting_s - before
        return group

    def discard(self, name: str) -> None:
        """End the processes of the engine ``name``; the next `start` begins with new ones."""
        group = self._groups.pop(name, None)
        if group is not None:
            group.close()

    def close(self) -> None:
        """End all processes."""
        for name in list(self._groups):
            self.discard(name)


class ServerPool:
    """One inference engine for each name: a server takes long to start, and serves many checks."""

    def __init__(self) -> None:
        self._engines: dict[str, InferenceEngine] = {}
        self._used_up: set[str] = set()

    def start(self, spec: EngineSpec, config: InferenceEngineConfig, *, keep: bool = True) -> InferenceEngine:
        """An engine of ``spec`` that serves ``config``'s model: the one that is there, if it does.

        ``keep=False`` is for a caller that changes its weights: nobody gets it after them.
        """
        engine = self._engines.get(spec.name)
        if engine is None or engine.config != config or spec.name in self._used_up:
            self.discard(spec.name)
            engine = self._started(spec, config)
        if not keep:
            self._used_up.add(spec.name)
        return engine

    def _started(self, spec: EngineSpec, config: InferenceEngineConfig) -> InferenceEngine:
        engine_class = load_engine(spec)
        assert issubclass(engine_class, InferenceEngine)
        engine = engine_class(spec, config)
        # Kept before it starts: what has been launched is ended even if it never gets ready.
        self._engines[spec.name] = engine
        addresses = engine.launch_server() if spec.supports(Capability.LAUNCH_SERVER) else None
        engine.initialize(addresses, FinetuneSpec())
        return engine

    def discard(self, name: str) -> None:
        """End the engine ``name``; the next `start` makes a new one."""
        self._used_up.discard(name)
        engine = self._engines.pop(name, None)
        if engine is not None:
            engine.destroy()

    def close(self) -> None:
        """End all engines."""
        for name in list(self._engines):
            self.discard(name)
