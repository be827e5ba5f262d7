"""Functions that checks run inside the ranks, where contexts and the rank's own place are at hand."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from core_rl.backend.loss import LossSpec
from core_rl.data.batch import SequenceBatch
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.data.outputs import ModelOutput, OutputName
from core_rl.engine.train import TrainEngine

__all__ = [
    "backward_on_parts",
    "disable_adapter",
    "fail_without_adapter",
    "forward_inside_train_mode",
    "train_mode_losses",
]


def backward_on_parts(
    engine: TrainEngine, parts: Sequence[SequenceBatch], loss: LossSpec, mb_spec: MicroBatchSpec
) -> dict[str, float]:
    """``forward_backward`` with the part of this data-parallel rank."""
    return engine.forward_backward(parts[engine.data_parallel_rank], loss, mb_spec)


def forward_inside_train_mode(
    engine: TrainEngine, batch: SequenceBatch, mb_spec: MicroBatchSpec, outputs: tuple[OutputName, ...]
) -> ModelOutput:
    """``forward`` of the whole batch on every rank, inside ``train_mode()``."""
    with engine.train_mode():
        output: ModelOutput = engine.forward(batch, mb_spec, outputs)
    return output


def train_mode_losses(
    engine: TrainEngine, batch: SequenceBatch, loss: LossSpec, mb_spec: MicroBatchSpec
) -> list[float]:
    """Two training losses before, and two after, a ``forward`` inside one ``train_mode()``."""
    losses = []
    with engine.train_mode():
        for turn in range(4):
            if turn == 2:
                engine.forward(batch, mb_spec)
            losses.append(engine.forward_backward(batch, loss, mb_spec)["loss"])
    engine.optimizer_zero_grad()
    return losses


def disable_adapter(engine: TrainEngine) -> None:
    """Enter and leave ``disable_adapter()``."""
    with engine.disable_adapter():
        pass


def fail_without_adapter(engine: TrainEngine) -> None:
    """Leave ``disable_adapter()`` by an error."""
    with suppress(ArithmeticError), engine.disable_adapter():
        raise ArithmeticError
