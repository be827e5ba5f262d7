"""Micro-batches so small that fixed batches never hold them."""

from __future__ import annotations

from collections.abc import Sequence

from core_rl.backend.steps import MicroBatchStep
from core_rl.backend.train_backend import PassMode
from core_rl.data.batch import SequenceBatch
from core_rl.reference.train import ReferenceBackend
from mutants.zoo import Mutant


@Mutant(
    "I1.any-batch",
    "a guard against empty micro-batches",
    r"(?s)of a drawn batch.*batch = SequenceBatch\.from_sequences",
)
class OneTokenIsNone(ReferenceBackend):
    """A micro-batch with a single trained token is taken for an empty one."""

    def run(self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep, mode: PassMode) -> None:
        for part in micro_batches:
            loss = step(self.outputs(part, step), part)
            if mode != "forward" and int(part.loss_mask.sum()) != 1:
                loss.backward()


@Mutant("I1.any-batch", "SkyRL #1296", r"(?s)gradients of a drawn batch.*mb_spec = MicroBatchSpec\(count")
class DropsWithNothingToPredict(ReferenceBackend):
    """A micro-batch of sequences of one token drops the gradients of those before it."""

    def run(self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep, mode: PassMode) -> None:
        for part in micro_batches:
            loss = step(self.outputs(part, step), part)
            if mode == "forward":
                continue
            if part.max_length == 1:
                self.zero_grad()
            else:
                loss.backward()
