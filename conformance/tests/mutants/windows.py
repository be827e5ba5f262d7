"""Engines that leave out what Qwen3 has not: windows, soft caps, an untied head."""

from __future__ import annotations

from core_rl.reference.train import ReferenceBackend
from mutants.bases import TrainContext
from mutants.zoo import Mutant


@Mutant("I1.gradients", "a window that is not read (I7)", "loss|gradients", family="gemma2")
class WindowIgnored(ReferenceBackend):
    """Every layer attends to all earlier tokens."""

    def build(self, context: TrainContext) -> None:
        super().build(context)
        self.model.config.sliding_window = self.model.config.max_position_embeddings


@Mutant("I1.gradients", "a kernel without caps of scores (I7)", "loss|gradients", family="gemma2")
class ScoresUncapped(ReferenceBackend):
    """Scores of attention keep their size."""

    def build(self, context: TrainContext) -> None:
        super().build(context)
        for module in self.model.modules():
            if hasattr(module, "attn_logit_softcapping"):
                setattr(module, "attn_logit_softcapping", None)  # noqa: B010  # not declared in its class


@Mutant("I7.logits", "a fused head without a cap (I7)", "logits", family="gemma2")
class LogitsUncapped(ReferenceBackend):
    """The head's cap is left out."""

    def build(self, context: TrainContext) -> None:
        super().build(context)
        self.model.config.final_logit_softcapping = None


@Mutant("I7.entropy", "a head that is always tied (I10)", "entropy", family="qwen3_moe")
class HeadAlwaysTied(ReferenceBackend):
    """The head is the embedding in spite of the config."""

    def build(self, context: TrainContext) -> None:
        super().build(context)
        head, embedding = self.model.get_output_embeddings(), self.model.get_input_embeddings()
        head.weight.data.copy_(embedding.weight.data)
