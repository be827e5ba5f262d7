"""Optimizer steps, clipping, skipped steps and the version."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from core_rl.backend.loss import LossSpec
from core_rl.backend.steps import MicroBatchStep
from core_rl.backend.tensors import LocalSlice
from core_rl.backend.train_backend import PassMode
from core_rl.config.engine import OptimizerConfig
from core_rl.data.batch import SequenceBatch
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.engine.components import TrainComponents
from core_rl.engine.step import TrainStep
from core_rl.reference.train import ReferenceBackend
from mutants.bases import OwnNorm, TrainContext, inside
from mutants.zoo import DP2, Mutant


@Mutant("I4.clipping", "clipping not applied", "gradients are not clipped")
class ClippingForgotten(ReferenceBackend):
    """The norm is computed, and the gradients are not scaled."""

    def step(self, scale: float, lr: float, count: int) -> None:
        super().step(1.0, lr, count)


@Mutant("I20.adamw", "defaults of backends", "norms and biases decay")
class DecaysEverything(ReferenceBackend):
    """Norms and biases decay like matrices."""

    def build(self, context: TrainContext) -> None:
        super().build(context)
        assert self.optimizer is not None and self.context.config.optimizer is not None
        for group in self.optimizer.param_groups:
            group["weight_decay"] = self.context.config.optimizer.weight_decay


@Mutant("I20.adamw", "Adam for AdamW", "through the moments")
class CoupledDecay(ReferenceBackend):
    """Adam with L2 regularisation: the decay goes through the moments."""

    def step(self, scale: float, lr: float, count: int) -> None:
        assert self.optimizer is not None
        groups = self.optimizer.param_groups
        decays = [group["weight_decay"] for group in groups]
        for group, decay in zip(groups, decays, strict=True):
            group["weight_decay"] = 0.0
            for parameter in group["params"]:
                parameter.grad.mul_(scale).add_(parameter.detach(), alpha=decay)
        super().step(1.0, lr, count)
        for group, decay in zip(groups, decays, strict=True):
            group["weight_decay"] = decay


@Mutant("I20.adamw", "a decay apart from the schedule", "the decay has the rate of the config")
class DecaysByTheConfigsRate(ReferenceBackend):
    """Matrices decay by the rate without its schedule."""

    def step(self, scale: float, lr: float, count: int) -> None:
        assert self.optimizer is not None and self.context.config.optimizer is not None
        full = self.context.config.optimizer.lr
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.data.mul_((1 - full * group["weight_decay"]) / (1 - lr * group["weight_decay"]))
        super().step(scale, lr, count)


@Mutant("I20.adamw", "a setting that is lost", "eps is 1e-05")
class EpsilonHardCoded(ReferenceBackend):
    """The configured epsilon does not reach the optimizer."""

    def build(self, context: TrainContext) -> None:
        super().build(context)
        for group in self.optimizer.param_groups if self.optimizer else ():
            group["eps"] = 1e-5


@Mutant("I20.adamw", "slime #1152", "of the step before")
class LearningRateLagsBehind(ReferenceBackend):
    """Each step uses the learning rate of the step before."""

    _next: float | None = None

    def step(self, scale: float, lr: float, count: int) -> None:
        previous, self._next = self._next, lr
        super().step(scale, lr if previous is None else previous, count)


@Mutant("I20.schedules", "warm-up", "the warm-up begins with 0")
@inside(ReferenceBackend, "step")
class WarmsUpLate(TrainStep):
    """The first step of a warm-up has a learning rate of 0."""

    def learning_rate(self, optimizer: OptimizerConfig) -> float:
        steps, warm_up = self.progress.lr_steps, optimizer.schedule.warmup_steps
        return optimizer.lr * steps / warm_up if steps < warm_up else super().learning_rate(optimizer)


@Mutant("I2.own-means", "AReaL's token_normalize_scope", "divided by their common weight", layout=DP2)
@inside(ReferenceBackend, "step")
class DividesByAllRanks(TrainStep):
    """With ``normalize_scope="dp"``, a rank's sum is divided by the weight of all ranks."""

    def loss_scale(self, loss: LossSpec, weights: list[float], total_weight: float | None) -> float:
        return super().loss_scale(replace(loss, normalize_scope="global"), weights, total_weight)


@Mutant("I20.adamw", "accelerate #3979", "one of bfloat16")
class HalfPrecisionMoments(ReferenceBackend):
    """Moments are kept in bfloat16."""

    def step(self, scale: float, lr: float, count: int) -> None:
        super().step(scale, lr, count)
        assert self.optimizer is not None
        for state in self.optimizer.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name].copy_(state[name].bfloat16())


@Mutant("I20.all-move", "pytorch #149205", "did not move")
class NormsAreNotTrained(ReferenceBackend):
    """The optimizer was built without the vectors."""

    def build(self, context: TrainContext) -> None:
        super().build(context)
        for group in self.optimizer.param_groups if self.optimizer else ():
            group["params"] = [parameter for parameter in group["params"] if parameter.dim() >= 2]


@Mutant("I20.frozen", "frozen parameters", "frozen weights")
class FrozenParametersDecay(ReferenceBackend):
    """Frozen parameters still decay."""

    def step(self, scale: float, lr: float, count: int) -> None:
        super().step(scale, lr, count)
        with torch.no_grad():
            for parameter in self.model.parameters():
                if not parameter.requires_grad:
                    parameter.mul_(1 - 1e-3)


@Mutant("I1.training", "vllm #44371", "the loss of step 1")
class StaleHead(ReferenceBackend):
    """The head computes with a copy of its weights from the first pass."""

    _copy: Tensor | None = None

    def sequence(self, ids: Tensor, step: MicroBatchStep) -> dict[str, Tensor]:
        if self.context.config.model.head != "lm":
            return super().sequence(ids, step)
        head = self.model.get_output_embeddings()
        if self._copy is None:
            self._copy = head.weight.detach().clone()
        hidden = self.model.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
        # The right gradient, at stale values.
        weight = self._copy + head.weight - head.weight.detach()
        return self.language_model(ids, hidden @ weight.T / step.temperature, step)


@Mutant("I1.train-batch", "AReaL #1273", "gradients times 2")
class GradientOfOtherSide(ReferenceBackend):
    """The exported gradients are right; the optimizer steps on something else."""

    def step(self, scale: float, lr: float, count: int) -> None:
        super().step(2.0 * scale, lr, count)


@Mutant("I20.nan-loss-skips", "skipped steps", "not finite: model")
class NanSurvivesTheSkip(ReferenceBackend):
    """Gradients that are not finite are not dropped with the skipped step."""

    def zero_grad(self) -> None:
        if all(bool(grad.isfinite().all()) for _, grad in self.gradients()):
            super().zero_grad()


@Mutant("I20.nan-loss-skips", "skipped steps", "infinite gradient")
class InfinityIsFiltered(OwnNorm):
    """The norm leaves out gradients that are not finite, so the step is made with them."""

    def counted(self) -> Iterable[LocalSlice]:
        return [replace(part, tensor=part.tensor.nan_to_num(0.0, 0.0, 0.0)) for part in super().counted()]


@Mutant("I4.clipping", "a coefficient without clamp(max=1)", "after a step whose norm is below the limit")
@inside(ReferenceBackend, "step")
class ScalesSmallGradientsUp(TrainStep):
    """Gradients are scaled to the limit, smaller ones too."""

    def clip_scale(self, optimizer: OptimizerConfig, norm: float) -> float:
        limit = optimizer.max_grad_norm
        return 1.0 if limit is None else limit / (norm + 1e-6)


@Mutant("contract.forward-only", "weights that need no master (contract)", "the head without an optimizer")
class HeadRoundedWithoutOptimizer(ReferenceBackend):
    """An engine that does not train holds its scalar head in bfloat16."""

    def adopt(self, model: PreTrainedModel, context: TrainContext, optimizer: Any = None) -> None:
        super().adopt(model, context, optimizer)
        if context.config.optimizer is None and context.config.model.head != "lm":
            head = model.get_parameter("score.weight").data
            head.copy_(head.bfloat16())


@Mutant("contract.forward-only", "a reference policy", "refuse")
@inside(ReferenceBackend, "step")
class TrainsWithoutOptimizer(TrainStep):
    """Any engine is taken for trainable."""

    def forward_backward(
        self, batch: SequenceBatch, loss: LossSpec, mb_spec: MicroBatchSpec, mode: PassMode, *totals: Any
    ) -> dict[str, float]:
        mode = mode if self.runtime.config.optimizer else "forward"
        return super().forward_backward(batch, loss, mb_spec, mode, *totals)

    def optimizer_step(self) -> dict[str, float]:
        return super().optimizer_step() if self.runtime.config.optimizer else {}


@Mutant("I16.all-masked", "empty batches", "all-masked batch")
@inside(ReferenceBackend, "step")
class StepsWithoutTokens(TrainStep):
    """A batch in which nothing counts still decays the weights."""

    def optimizer_step(self) -> dict[str, float]:
        if not self.gradients.weight:
            for part in self.runtime.backend.state().local("master"):
                part.tensor.mul_(1 - 1e-4)
        return super().optimizer_step()


class _RaisesTheVersion(TrainStep):
    """Counts steps as versions."""

    def optimizer_step(self) -> dict[str, float]:
        report, progress = super().optimizer_step(), self.progress
        self.progress = replace(progress, version=progress.version + int(report["update_successful"]))
        return report


@Mutant("contract.version", "AReaL #941", "the driver set 41")
class CountsItsOwnVersion(ReferenceBackend):
    """Each step raises the version, which is the driver's."""

    components = TrainComponents(step=_RaisesTheVersion)


@Mutant("I10.tied-after-steps", "Automodel #2511", "tied", family="qwen3")
class UntiesTheHead(ReferenceBackend):
    """The head becomes a parameter of its own when the model is built."""

    def build(self, context: TrainContext) -> None:
        super().build(context)
        self._separate = self.model.get_output_embeddings().weight.detach().clone()

    def sequence(self, ids: Tensor, step: MicroBatchStep) -> dict[str, Tensor]:
        if self.context.config.model.head != "lm":
            return super().sequence(ids, step)
        hidden = self.model.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
        weight = self.model.get_output_embeddings().weight
        attached = self._separate + weight - weight.detach()
        return self.language_model(ids, hidden @ attached.T / step.temperature, step)

    def step(self, scale: float, lr: float, count: int) -> None:
        before = self.model.get_output_embeddings().weight.detach().clone()
        super().step(scale, lr, count)
        # Half of the shared matrix's step: as if each use had its own optimizer.
        self._separate += 0.5 * (self.model.get_output_embeddings().weight.detach() - before)
