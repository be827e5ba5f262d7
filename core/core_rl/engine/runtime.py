"""State that the parts of one train engine share."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from core_rl.backend.meta import EngineProgress
from core_rl.backend.train_backend import AnyTrainBackend
from core_rl.config.engine import TrainEngineConfig
from core_rl.distributed.comm import Comm, RankGroups
from core_rl.engine.guards import require_state
from core_rl.engine.schedule_function import ScheduleFunction
from core_rl.errors import EngineStateError
from core_rl.registry.spec import EngineSpec
from core_rl.state.rng_state import RngState
from core_rl.state.store import TensorStore

__all__ = ["Pending", "Runtime", "Status"]


@dataclass
class Status:
    """The life of an engine: new, ready, failed or destroyed."""

    name: str = "new"
    failure: BaseException | None = None
    """The first error, of an engine that failed."""

    def require(self, needed: str, method: str) -> None:
        """Raise `EngineStateError` unless the engine is in the state that ``method`` needs."""
        if self.name == "failed":
            raise EngineStateError(
                f"{method} on an engine that has failed: {type(self.failure).__name__}: {self.failure}. Its ranks are "
                "not in step any more; destroy() it and build another"
            ) from self.failure
        require_state(self.name, needed, method)

    def fail(self, error: BaseException) -> None:
        """Record the error after which the engine cannot be used."""
        self.name, self.failure = "failed", error


@dataclass
class Pending:
    """Accumulation since the last optimizer step."""

    passes: int = 0
    weight: float = 0.0
    finite: bool = True
    reduced: bool = False
    failed: bool = False
    """A pass raised, so that the gradients are of a part of the batch."""

    def require_open(self) -> None:
        """Raise `EngineStateError` where no more gradients may be added."""
        if self.failed:
            raise EngineStateError(
                "forward_backward() after a pass that raised: the gradients are of a part of the batch; call "
                "optimizer_zero_grad() first"
            )
        if self.reduced:
            raise EngineStateError(
                "the gradients were already reduced by an export; call optimizer_step() or optimizer_zero_grad() first"
            )


@dataclass
class Runtime:
    """One rank of a train engine that is ready."""

    spec: EngineSpec
    config: TrainEngineConfig
    backend: AnyTrainBackend
    status: Status
    world: Comm
    groups: RankGroups
    device: torch.device
    rng: RngState
    schedule_steps: int | None
    """The number of steps of the learning rate's schedule; None where it has no end."""
    schedule_function: ScheduleFunction | None
    """The schedule, where it is a function."""
    tensors: TensorStore
    progress: EngineProgress = field(default_factory=EngineProgress)
    pending: Pending = field(default_factory=Pending)
