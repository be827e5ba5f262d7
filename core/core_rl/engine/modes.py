"""`Modes`: training and evaluation mode, offloading, and the adapter's switch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from core_rl.backend.meta import StatePart
from core_rl.backend.protocols import MemoryPart, SupportsLora, SupportsOffload, SupportsOwnOffload
from core_rl.config.capability import Capability
from core_rl.engine import guards
from core_rl.engine.runtime import Runtime
from core_rl.errors import EngineStateError
from core_rl.state.memory import HostCopies

MEMORY: dict[StatePart, tuple[MemoryPart, ...]] = {
    "model": ("weights", "gradients"),
    "optimizer": ("optimizer",),
}


class Modes:
    """Modes of one engine, and which of its parts are offloaded."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.mode: str | None = None
        self.adapter_off = False
        self.offloaded: frozenset[StatePart] = frozenset()
        self._copies: dict[StatePart, HostCopies] = {}
        self._zero_on_return = False

    # ----------------------------------------------------------------- modes

    @contextmanager
    def inside(self, mode: str) -> Iterator[None]:
        """``train`` or ``eval`` inside the context; offloaded weights are on the device there."""
        previous = self.mode
        with self.onloaded("model"):
            self._enter(mode)
            try:
                yield
            finally:
                self._enter(previous)

    def _enter(self, mode: str | None) -> None:
        """Nothing where the mode stays, since the backend looks at each of its modules."""
        if mode != self.mode:
            self.mode = mode
            self.runtime.backend.set_training(mode == "train")

    # ------------------------------------------------------------- adapters

    def switch_adapter(self, on: bool) -> bool:
        """Turn the adapter on or off; returns whether it was on."""
        was_on = not self.adapter_off
        backend = self.runtime.backend
        if on != was_on:
            assert isinstance(backend, SupportsLora)  # declared, so implemented
            backend.set_adapter(on)
            self.adapter_off = not on
        return was_on

    # ------------------------------------------------------------- offloading

    @contextmanager
    def onloaded(self, *parts: StatePart) -> Iterator[None]:
        """These parts on the engine's device inside the context; offloaded again after it if they were before."""
        offloaded = self.offloaded.intersection(parts)
        self.onload(offloaded)
        try:
            yield
        finally:
            self.offload(offloaded)

    def move(self, parts: frozenset[StatePart], method: str, *, away: bool) -> None:
        """Offload ``parts`` or bring them back, for the public ``method``."""
        guards.require_capability(self.runtime.spec, Capability.OFFLOAD, method)
        if self.mode is not None and "model" in parts and away:
            raise EngineStateError(f"{method} inside {self.mode}_mode(); leave the context first")
        (self.offload if away else self.onload)(parts)

    def offload(self, parts: frozenset[StatePart]) -> None:
        """Copy ``parts`` to host memory and free their storage."""
        backend = self.runtime.backend
        for part in sorted(parts - self.offloaded):
            if isinstance(backend, SupportsOwnOffload):
                backend.offload(part)
            else:
                assert isinstance(backend, SupportsOffload)  # declared, so implemented
                copies = self._copies[part] = HostCopies()
                backend.synchronize()
                for memory in MEMORY[part]:
                    copies.take(backend.memory(memory))
            self.offloaded |= {part}

    def onload(self, parts: frozenset[StatePart]) -> None:
        """Bring ``parts`` back, bit for bit."""
        backend = self.runtime.backend
        for part in sorted(parts & self.offloaded):
            if isinstance(backend, SupportsOwnOffload):
                backend.onload(part)
            else:
                self._copies.pop(part).give_back()
            self.offloaded -= {part}
        if self._zero_on_return and "model" not in self.offloaded:
            self.zero_grad()

    def zero_grad(self) -> None:
        """Drop the gradients; of an offloaded model, as soon as it is back."""
        self._zero_on_return = "model" in self.offloaded
        if not self._zero_on_return:
            self.runtime.backend.zero_grad()


def parts_of(model: bool, optimizer: bool) -> frozenset[StatePart]:
    """The parts that are asked for."""
    flags: dict[StatePart, bool] = {"model": model, "optimizer": optimizer}
    return frozenset(part for part, included in flags.items() if included)
