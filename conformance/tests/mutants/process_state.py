"""Engines that change the process around them while they are built."""

from __future__ import annotations

import random

import numpy as np
import torch

from core_rl.backend.train_backend import BuildContext
from core_rl.config.engine import TrainEngineConfig
from core_rl.reference.train import ReferenceBackend
from mutants.zoo import Mutant


@Mutant(
    "contract.global-state",
    "a trainer's seed_everything()",
    r"initialize\(\) seeds random\.getstate\(\), seeds numpy\.random\.get_state\(\)\n",
)
class SeedsPython(ReferenceBackend):
    """A build seeds the global generators of Python and numpy."""

    def build(self, context: BuildContext[TrainEngineConfig]) -> None:
        random.seed(context.seed)
        np.random.seed(context.seed % 2**32)
        super().build(context)


@Mutant(
    "contract.global-state",
    "a trainer's set_float32_matmul_precision",
    r"after initialize\(\), on rank 0: torch\.get_float32_matmul_precision\(\) is high",
)
class AsksForTf32(ReferenceBackend):
    """A build lets all matrix products of the process be less precise than float32."""

    def build(self, context: BuildContext[TrainEngineConfig]) -> None:
        super().build(context)
        torch.set_float32_matmul_precision("high")
