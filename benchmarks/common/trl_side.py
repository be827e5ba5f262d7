"""TRL's SFTTrainer, one optimizer step at a time."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Sequence
from typing import Any

import datasets
from torch import Tensor
from transformers import (
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)
from trl import SFTConfig, SFTTrainer

from common.bare import build
from common.rollouts import word_tokenizer
from common.workload import MODEL

UNLOGGED: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "lr_scheduler_type": "constant",
    "max_steps": 10**9,
    "logging_strategy": "no",
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}
"""Settings of every trainer: float32, a constant learning rate, no end, no logging and no saving."""


def trl_step(
    path: str, ids: Sequence[Tensor], *, rows: int, padding_free: bool, checkpointing: bool | None
) -> Callable[[], None]:
    """A function that lets the trainer's own loop run up to the end of its next optimizer step.

    Everything is the trainer's default but what makes the work the same: float32, the learning rate, micro-batches
    of ``rows`` that add up to all of ``ids``, and no logging, saving or evaluation. ``checkpointing`` None is
    the trainer's choice.
    """
    arguments: dict[str, Any] = {} if checkpointing is None else {"gradient_checkpointing": checkpointing}
    config = SFTConfig(
        output_dir=tempfile.mkdtemp(prefix="trl-"),
        learning_rate=1e-4,
        weight_decay=0.01,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=len(ids) // rows,
        max_length=None,
        padding_free=padding_free,
        dataset_kwargs={"skip_prepare_dataset": True},
        **UNLOGGED,
        **arguments,
    )
    trainer = SFTTrainer(
        model=build(MODEL, packed=False, path=path),
        args=config,
        train_dataset=datasets.Dataset.from_dict({"input_ids": [row.tolist() for row in ids]}),
        processing_class=word_tokenizer(),  # it uses only the padding token
    )
    gate = StepGate()
    gate.attach(trainer)
    return gate.run


class StepGate(TrainerCallback):
    """Blocks the trainer's own loop, in a thread, after every ``steps`` optimizer steps until `run` is called again."""

    def __init__(self, steps: int = 1) -> None:
        self._start, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._steps = steps
        self._loop: threading.Thread | None = None

    def attach(self, trainer: Trainer) -> None:
        """Run the loop of ``trainer``, which prints nothing, from now on."""
        trainer.add_callback(self)
        for printing in (PrinterCallback, ProgressCallback):
            trainer.remove_callback(printing)
        self._loop = threading.Thread(target=trainer.train, daemon=True)

    def run(self) -> None:
        """Let the trainer take its next ``steps`` optimizer steps."""
        assert self._loop is not None
        self._start.release()
        if not self._loop.is_alive():
            self._loop.start()
        self._done.acquire()

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._start.acquire()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.global_step % self._steps == 0:
            self._done.release()
            self._start.acquire()
