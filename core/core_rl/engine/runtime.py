"""`Runtime`: what one rank of a train engine is built of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from core_rl.backend.inference_backend import ModelLimits
from core_rl.backend.train_backend import AnyTrainBackend
from core_rl.config.engine import TrainEngineConfig
from core_rl.distributed.comm import Comm, RankGroups
from core_rl.engine.schedule import ScheduleFunction
from core_rl.registry.spec import EngineSpec
from core_rl.state.rng_state import RngState
from core_rl.state.store import TensorStore

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """Constants of one rank of a train engine from `TrainEngine.initialize` to `TrainEngine.destroy`."""

    spec: EngineSpec
    config: TrainEngineConfig
    backend: AnyTrainBackend
    model: PretrainedConfig
    """Config of the model with its head."""
    limits: ModelLimits
    world: Comm
    groups: RankGroups
    device: torch.device
    rng: RngState
    schedule_steps: int | None
    """The number of steps of the learning rate's schedule; None where it has no end."""
    schedule_function: ScheduleFunction | None
    """The schedule, where it is a function."""
    tensors: TensorStore
