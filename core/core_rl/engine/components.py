"""Parts that a `TrainEngine` is made of."""

from __future__ import annotations

from dataclasses import dataclass

from core_rl.engine.modes import Modes
from core_rl.engine.passes import Passes
from core_rl.engine.persistence import Persistence
from core_rl.engine.updates import Updates
from core_rl.state.store import TensorStore

__all__ = ["TrainComponents"]


@dataclass(frozen=True, kw_only=True)
class TrainComponents:
    """Classes of the parts. Only the suite's own tests give others: faulty ones, which checks must reject."""

    tensors: type[TensorStore] = TensorStore
    modes: type[Modes] = Modes
    passes: type[Passes] = Passes
    updates: type[Updates] = Updates
    persistence: type[Persistence] = Persistence
