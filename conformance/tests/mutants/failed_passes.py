"""State left over from a raising pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from core_rl.backend.steps import MicroBatchStep
from core_rl.backend.train_backend import PassMode
from core_rl.data.batch import SequenceBatch
from core_rl.engine.step import TrainStep
from core_rl.reference.train import ReferenceBackend
from mutants.bases import inside
from mutants.zoo import Mutant


@Mutant(
    "I5.failed-pass",
    "FSDP2 after a failed forward pass",
    "log-probs of weights that were loaded after a pass that raised",
)
class KeepsGatheredWeights(ReferenceBackend):
    """Each pass gathers the head's weights, and a failed pass leaves them to the next one."""

    _gathered: Tensor | None = None

    def run(self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep, mode: PassMode) -> None:
        if self._gathered is None:
            self._gathered = self.model.get_output_embeddings().weight.detach().clone()
        super().run(micro_batches, step, mode)
        self._gathered = None

    def sequence(self, ids: Tensor, step: MicroBatchStep) -> dict[str, Tensor]:
        if self.context.config.model.head != "lm":
            return super().sequence(ids, step)
        assert self._gathered is not None
        hidden = self.model.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
        head = self.model.get_output_embeddings().weight
        # The right gradient, at values that may be stale.
        weight = self._gathered + head - head.detach()
        return self.language_model(ids, hidden @ weight.T / step.temperature, step)


@Mutant("I5.failed-pass", "a repeated forward_backward()", "multiplied by 2")
class CountsAFailedPassTwice(ReferenceBackend):
    """Gradients are dropped where the last pass has ended, and only there."""

    _running = False

    def run(self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep, mode: PassMode) -> None:
        self._running = True
        super().run(micro_batches, step, mode)
        self._running = False

    def zero_grad(self) -> None:
        if not self._running:
            super().zero_grad()


@Mutant("I5.failed-pass", "a repeated forward_backward()", "was not refused")
@inside(ReferenceBackend, "step")
class RepeatsAFailedPass(TrainStep):
    """A pass is repeated on the gradients of the raising pass."""

    def forward_backward(self, *arguments: Any) -> dict[str, float]:
        try:
            return super().forward_backward(*arguments)
        finally:
            self.gradients.failed = False
