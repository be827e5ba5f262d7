"""`EngineModes`: where a train engine stands among its peers, its modes, and what is offloaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import torch

from core_rl.backend.meta import StatePart
from core_rl.backend.progress import EngineProgress, Pending
from core_rl.backend.train_hooks import TrainHooks
from core_rl.config.capability import Capability
from core_rl.config.engine import TrainEngineConfig
from core_rl.config.layout import ParallelLayout
from core_rl.distributed.comm import Comm, RankGroups
from core_rl.distributed.process_group import Membership
from core_rl.engine import guards
from core_rl.errors import ConfigError, EngineStateError
from core_rl.registry.spec import EngineSpec
from core_rl.state.rng_state import Draws

if TYPE_CHECKING:
    from core_rl.checkpoint.background import BackgroundSave

__all__ = ["EngineModes", "parts_of"]


class EngineModes(TrainHooks):
    """Places, modes and offloading of a train engine; the base of its public methods."""

    device: torch.device
    """Where this rank computes."""
    _membership: Membership
    _rank_groups: RankGroups
    _draws: Draws
    _total_steps: int | None

    def __init__(self, spec: EngineSpec, config: TrainEngineConfig) -> None:
        guards.check_config(spec, config)
        self.spec = spec
        self.config = config
        self._state = "new"
        self._mode: str | None = None
        self._offloaded: frozenset[StatePart] = frozenset()
        self._base_only: AbstractContextManager[None] | None = None
        self._pending = Pending()
        self._progress = EngineProgress()
        self._background: BackgroundSave | None = None

    # ---------------------------------------------------------------- places

    @property
    def layout(self) -> ParallelLayout:
        """The parallel degrees."""
        return self.config.layout

    @property
    def world(self) -> Comm:
        """All ranks of this engine."""
        return self._membership.world

    @property
    def timeout_s(self) -> float:
        """How long ranks wait for each other, in seconds."""
        return self._membership.address.timeout_s

    @property
    def data_parallel_rank(self) -> int:
        """This rank's number among those that see other sequences."""
        return self._rank_groups.data_parallel.rank

    @property
    def data_parallel_size(self) -> int:
        """How many parts a batch is split into."""
        return self._rank_groups.data_parallel.size

    @property
    def data_parallel_group(self) -> Comm:
        """The ranks at the same place of the model that see other sequences."""
        return self._rank_groups.data_parallel

    @property
    def is_output_rank(self) -> bool:
        """Whether exported tensors appear on this rank: one rank of each model-parallel group."""
        return self._rank_groups.is_output_rank

    @property
    def is_writer(self) -> bool:
        """Whether this rank writes what exists once: the output rank of data-parallel rank 0."""
        return self.is_output_rank and self.data_parallel_rank == 0

    # ----------------------------------------------------------------- modes

    @contextmanager
    def train_mode(self) -> Iterator[None]:
        """Training mode (dropout on) inside the context; offloaded weights are there meanwhile."""
        with self._in_mode("train"):
            yield

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        """Evaluation mode (dropout off) inside the context; offloaded weights are there meanwhile."""
        with self._in_mode("eval"):
            yield

    @contextmanager
    def _in_mode(self, mode: str) -> Iterator[None]:
        guards.require_state(self._state, "ready", f"{mode}_mode()")
        previous = self._mode
        with self._onloaded("model"):
            self._mode = mode
            self._set_training(mode == "train")
            try:
                yield
            finally:
                self._mode = previous
                self._set_training(previous == "train")

    @contextmanager
    def _onloaded(self, *parts: StatePart) -> Iterator[None]:
        """These parts on the engine's device inside the context; offloaded again after it if they were before."""
        away = self._offloaded.intersection(parts)
        self._bring_back(away)
        try:
            yield
        finally:
            self._send_away(away)

    # ------------------------------------------------------------- adapters

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """The base model inside the context: adapters off in `forward` and `eval_batch`.

        Training and exports of merged weights are refused inside. Raises `EngineStateError` where
        ``model.lora`` is not set.
        """
        was_on = self._switch_adapter(on=False)
        try:
            yield
        finally:
            self._switch_adapter(on=was_on)

    @property
    def _adapter_off(self) -> bool:
        return self._base_only is not None

    def _switch_adapter(self, on: bool) -> bool:
        """Either half of `disable_adapter`, for a driver, which cannot hold a context of another process.

        Returns whether the adapter was on.
        """
        was_on = not self._adapter_off
        guards.require_capability(self.spec, Capability.LORA, "disable_adapter()")
        guards.require_state(self._state, "ready", "disable_adapter()")
        guards.require_adapter(self.config, "disable_adapter()")
        if on and self._base_only is not None:
            context, self._base_only = self._base_only, None
            context.__exit__(None, None, None)
        elif not on and self._base_only is None:
            context = self._adapter_disabled()
            context.__enter__()
            self._base_only = context
        return was_on

    # -------------------------------------------------------------- offloading

    def to(self, device: torch.device | str, model: bool = True, optimizer: bool = True) -> None:
        """Weights and gradients (``model``) and moments (``optimizer``): back to the engine's device, or to the host.

        On an engine whose device is the CPU, ``to("cpu")`` brings back what `offload` took away. Raises
        `ConfigError` for a third device. No collective.
        """
        target = torch.device(device)
        guards.require_state(self._state, "ready", "to()")
        if target.type not in ("cpu", self.device.type):
            raise ConfigError(f"to({str(device)!r}): this engine lives on {self.device}; name that, or 'cpu'")
        self._move(parts_of(model, optimizer), "to()", away=target.type != self.device.type)

    def onload(self) -> None:
        """Bring everything back to the engine's device. No collective."""
        self._move(parts_of(True, True), "onload()", away=False)

    def offload(self) -> None:
        """Keep everything in host memory until `onload`; modes and calls that need it bring it back meanwhile.

        What is offloaded is not on the device, also where that is the CPU: reading it raises
        `EngineStateError`. No collective.
        """
        self._move(parts_of(True, True), "offload()", away=True)

    def _move(self, parts: frozenset[StatePart], method: str, *, away: bool) -> None:
        guards.require_state(self._state, "ready", method)
        guards.require_capability(self.spec, Capability.OFFLOAD, method)
        if self._mode is not None and "model" in parts and away:
            raise EngineStateError(f"{method} inside {self._mode}_mode(); leave the context first")
        (self._send_away if away else self._bring_back)(parts)

    def _send_away(self, parts: frozenset[StatePart]) -> None:
        for part in sorted(parts - self._offloaded):
            self._offload(part)
            self._offloaded |= {part}

    def _bring_back(self, parts: frozenset[StatePart]) -> None:
        for part in sorted(parts & self._offloaded):
            self._onload(part)
            self._offloaded -= {part}


def parts_of(model: bool, optimizer: bool) -> frozenset[StatePart]:
    """The parts that are asked for."""
    chosen: dict[StatePart, bool] = {"model": model, "optimizer": optimizer}
    return frozenset(part for part, wanted in chosen.items() if wanted)
