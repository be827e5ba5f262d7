"""Train engines that do not fit their inference engine, and masks made of token ids."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from core_rl.backend.steps import MicroBatchStep
from core_rl.backend.tensors import NamedTensors
from core_rl.engine.components import TrainComponents
from core_rl.engine.step import TrainStep
from core_rl.reference.train import ReferenceBackend
from mutants.bases import OwnExport, TrainContext
from mutants.outputs import WithTemperature
from mutants.rollouts import ReportsWithoutTemperature
from mutants.zoo import Mutant, spec_of


@Mutant(
    "I8.score-vs-train",
    "NeMo-RL #316, verl #3133, OpenRLHF #857, TRL #3029, AReaL #581, slime #557",
    "the train engine .* is off the oracle, and the rollout engine 'reference-rollout' agrees",
)
class RecomputesAtTemperatureOne(ReferenceBackend):
    """Log-probs of the trainer are without the temperature."""

    def sequence(self, ids: Tensor, step: MicroBatchStep) -> dict[str, Tensor]:
        return super().sequence(ids, WithTemperature(step, 1.0))


@Mutant(
    "I8.full-distribution",
    "an error that drawn tokens cannot show (I8)",
    "the train engine .* is off the oracle",
)
class ClampsLogits(ReferenceBackend):
    """Logits far below the largest are clamped: these tokens are never drawn."""

    def sequence(self, ids: Tensor, step: MicroBatchStep) -> dict[str, Tensor]:
        outputs = super().sequence(ids, step)
        if "logits" in outputs:
            outputs["logits"] = outputs["logits"].clamp(min=-8.0)
        return outputs


@Mutant("I12.sync-end-to-end", "verl #7014", "the sender wrote other weights than it has")
class UploadsTheStepBefore(OwnExport):
    """The uploaded weights were gathered before the step."""

    def step(self, scale: float, lr: float, count: int) -> None:
        stream = super().export_tensors("params")
        self._gathered = {name: value.detach().clone() for name, value in stream if value is not None}
        super().step(scale, lr, count)

    def export_tensors(self, kind: str) -> NamedTensors:
        if kind == "params" and hasattr(self, "_gathered"):
            yield from self._gathered.items()
        else:
            yield from super().export_tensors(kind)


class _RaisesTheVersion(TrainStep):
    """Records a version above the driver's."""

    def set_version(self, version: int) -> None:
        super().set_version(version + 1)


@Mutant("I12.sync-end-to-end", "prime-rl #1901", r"get_version\(\) is .*train engine': 2")
class CountsVersionsItself(ReferenceBackend):
    """Every upload raises the version."""

    components = TrainComponents(step=_RaisesTheVersion)


@Mutant(
    "I8.score-vs-train",
    "TRL #4159",
    "the rollout engine 'reports-without-temperature' is off the oracle, and the train engine",
    partner=spec_of(ReportsWithoutTemperature),
)
class BesideAWrongRollout(ReferenceBackend):
    """A correct trainer, with an inference engine that reports log-probs without the temperature."""


@Mutant("I19.eos-trained", "TRL #3200", "log-probs with EOS inside")
class EndIsNotTrained(ReferenceBackend):
    """Tokens with the id of padding have no log-prob, and so no gradient."""

    def sequence(self, ids: Tensor, step: MicroBatchStep) -> dict[str, Tensor]:
        outputs = super().sequence(ids, step)
        real = ids != self.model.config.pad_token_id
        return {
            name: torch.where(real, value, 0.0) if value.dim() == 1 else value
            for name, value in outputs.items()
        }


@Mutant(
    "I19.eos-trained",
    "verl #4710: stock Megatron embeddings beside padding_idx of transformers",
    "only rows .* which are token ids",
)
class PaddingHasAGradient(ReferenceBackend):
    """The input embedding is of a make that knows nothing of ``padding_idx``."""

    def build(self, context: TrainContext) -> None:
        super().build(context)
        embedding = self.model.get_input_embeddings()
        assert isinstance(embedding, nn.Embedding)
        embedding.padding_idx = None


@Mutant("I19.eos-trained", "TRL #3200", "after one with the id|EOS inside")
class EndIsNotSeen(ReferenceBackend):
    """The attention mask is made of ids that are not padding."""

    def sequence(self, ids: Tensor, step: MicroBatchStep) -> dict[str, Tensor]:
        padding = self.model.config.pad_token_id
        if padding is None:
            return super().sequence(ids, step)
        mask = (ids != padding).long()
        logits = self.model(input_ids=ids[None], attention_mask=mask[None], use_cache=False).logits[0].float()
        return self.language_model(ids, logits / step.temperature, step)
