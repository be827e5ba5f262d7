"""Mutants of the plain trainer, and the check that each dies by. Many are bugs that frameworks have shipped."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor

from core_rl_conformance.trainers.interface import MicroBatches, TrainerSetup, TrainSequence
from core_rl_oracle.loss_names import AdvantageRule
from core_rl_oracle.policy_losses import PolicyLoss
from trainers.plain import PlainTrainer

Rows = Sequence[tuple[TrainSequence, Tensor]]


class MeanOfMicroBatchMeans(PlainTrainer):
    """As in transformers before #34191: right for one micro-batch on each rank."""

    def divisor(self, rows: Rows, part: Rows, batch: Rows, loss: PolicyLoss) -> float:
        return self.weight(batch, loss) * self.weight(rows, loss) / self.weight(part, loss)

    def share(self, batches: Sequence[object], ranks: Sequence[object]) -> float:
        return 1.0 / len(batches)


class WeighedImitation(PlainTrainer):
    """Advantages weigh the tokens of a demonstration."""

    def objective(self, logprobs: Tensor, ratios: Tensor, advantages: Tensor, loss: PolicyLoss) -> Tensor:
        values = super().objective(logprobs, ratios, advantages, loss)
        return values * advantages if loss.objective == "cross_entropy" else values


class MeanOfRankMeans(PlainTrainer):
    """Each rank divides by its own tokens, and the reduction takes the mean."""

    def divisor(self, rows: Rows, part: Rows, batch: Rows, loss: PolicyLoss) -> float:
        return self.weight(part, loss)

    def share(self, batches: Sequence[object], ranks: Sequence[object]) -> float:
        return 1.0 / len(ranks)


class LongestOfMicroBatch(PlainTrainer):
    """The constant of Dr. GRPO is the padded length of the micro-batch, as in verl 0.9.1."""

    def aggregated(self, terms: Sequence[Tensor], batch: Rows, loss: PolicyLoss) -> Tensor:
        total = super().aggregated(terms, batch, loss)
        longest = max(len(row.input_ids) for row, _ in batch)
        return total * loss.fixed_length / longest if loss.aggregation == "fixed_length" else total


class OneClipBound(PlainTrainer):
    """The lower bound on both sides."""

    def bounded(self, ratios: Tensor, loss: PolicyLoss) -> Tensor:
        return ratios.clamp(1 - loss.clip_low, 1 + loss.clip_low)


class WeightsWithGradient(PlainTrainer):
    """CISPO's weights keep their graph."""

    def weights_of(self, ratios: Tensor, loss: PolicyLoss) -> Tensor:
        return self.bounded(ratios, loss)


class MeanOverAllTokens(PlainTrainer):
    """GSPO's mean counts the prompt."""

    def sequence_mean(self, values: Tensor, mask: Tensor) -> Tensor:
        return values.mean()


class DualBoundForAll(PlainTrainer):
    """The second bound whatever the sign of the advantage."""

    def bounded_below(self, advantages: Tensor) -> Tensor:
        return torch.ones_like(advantages, dtype=torch.bool)


class AdvantagesOneEarly(PlainTrainer):
    """The advantage of the token before."""

    def aligned(self, advantages: Tensor) -> Tensor:
        return advantages[:-1]


class ExchangedArguments(PlainTrainer):
    """KL(reference || policy)."""

    def divergence(self, logprobs: Tensor, reference: Tensor, loss: PolicyLoss) -> Tensor:
        return super().divergence(reference, logprobs, loss)


class EntropyWithoutGradient(PlainTrainer):
    """The entropy is there for its metric alone."""

    def entropy(self, log_p: Tensor) -> Tensor:
        return super().entropy(log_p).detach()


class EntropyOfMicroBatch(PlainTrainer):
    """A bonus of means over the tokens of each micro-batch, as in TRL 1.16.0."""

    def cut(
        self, rows: list[tuple[TrainSequence, Tensor]], cut: MicroBatches
    ) -> list[list[tuple[TrainSequence, Tensor]]]:
        batches = super().cut(rows, cut)
        self.count = len(batches) * self.setup.ranks
        return batches

    def loss_of(self, batch: Rows, loss: PolicyLoss, rows: Rows, part: Rows, clipped: list[Tensor]) -> Tensor:
        self.scale = self.weight(rows, loss) / (self.weight(batch, loss) * self.count)
        return super().loss_of(batch, loss, rows, part, clipped)

    def entropy(self, log_p: Tensor) -> Tensor:
        return super().entropy(log_p) * self.scale


class TemperatureInBFloat16(PlainTrainer):
    """Logits are divided in bfloat16, as in verl 0.9.1."""

    def at_temperature(self, logits: Tensor, temperature: float) -> Tensor:
        return (logits.bfloat16() / temperature).float()


class MetricOfMicroBatches(PlainTrainer):
    """A mean of micro-batches' fractions, as verl's ``pg_clipfrac``."""

    def clipped_fraction(self, clipped: Sequence[Tensor], cut: MicroBatches) -> float:
        return sum(float(part.float().mean()) for part in clipped) / len(clipped)

    def train_batch(
        self, sequences: Sequence[TrainSequence], cut: MicroBatches, apply: bool = True
    ) -> Mapping[str, float]:
        metrics = super().train_batch(sequences, cut, apply)
        return {**metrics, "micro_batches": float(cut.sequences or 1)}


class UntrainedCount(PlainTrainer):
    """Sequences without a trained token are in the divisor."""

    def weight(self, rows: Rows, loss: PolicyLoss) -> float:
        weight = super().weight(rows, loss)
        return (
            weight
            if loss.aggregation == "token_mean"
            else weight + sum(not r.loss_mask.any() for r, _ in rows)
        )


class FirstTokensCount(PlainTrainer):
    """The first token of each sequence is in the divisor."""

    def weight(self, rows: Rows, loss: PolicyLoss) -> float:
        first = sum(int(row.loss_mask[0]) for row, _ in rows)
        return super().weight(rows, loss) + (first if loss.aggregation == "token_mean" else 0.1 * first)


class BatchBaseline(PlainTrainer):
    """The baseline is the mean of the batch."""

    def advantages_of(self, rows: Sequence[TrainSequence], rule: AdvantageRule) -> list[Tensor]:
        rewards = torch.tensor([row.reward for row in rows])
        return [
            value.expand(len(r.input_ids)) for r, value in zip(rows, rewards - rewards.mean(), strict=True)
        ]


class BiasedDeviation(PlainTrainer):
    """GRPO's deviation divides by n."""

    def of_group(self, rewards: Tensor, rule: AdvantageRule) -> Tensor:
        right = super().of_group(rewards, rule)
        differ = rule == "grpo" and bool(rewards.std() > 0)
        return right * rewards.std() / rewards.std(correction=0) if differ else right


class ClipsEachMicroBatch(PlainTrainer):
    """What has been accumulated is clipped after each micro-batch."""

    def after_backward(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)


class ReportsClippedNorm(PlainTrainer):
    """The norm is taken after clipping."""

    def clip(self) -> float:
        super().clip()
        return self.norm()


class ScheduleForEachMicroBatch(PlainTrainer):
    """A step of the schedule for each micro-batch."""

    def after_backward(self) -> None:
        self.scheduler.step()


class OwnEpsilon(PlainTrainer):
    """The optimizer's epsilon is not the configured one."""

    def build(self, setup: TrainerSetup) -> None:
        super().build(setup)
        for group in self.optimizer.param_groups:
            group["eps"] = 1e-8


class ForgetsSchedule(PlainTrainer):
    """A checkpoint without the schedule, as in AReaL 1.0.4."""

    def state(self) -> dict[str, object]:
        optimizer: Any = self.optimizer.state_dict()
        groups = [
            {**group, "lr": group["initial_lr"] * self.factor(0)} for group in optimizer["param_groups"]
        ]
        return {"model": self.model.state_dict(), "optimizer": {**optimizer, "param_groups": groups}}


class ForgetsMoments(PlainTrainer):
    """A checkpoint without the optimizer's moments."""

    def state(self) -> dict[str, object]:
        state = super().state()
        optimizer: Any = state["optimizer"]
        return {**state, "optimizer": {**optimizer, "state": {}}}


class DropsLastBatch(PlainTrainer):
    """As ``drop_last``."""

    def epoch(self, count: int, batch_size: int) -> Sequence[Sequence[int]]:
        return [batch for batch in super().epoch(count, batch_size) if len(batch) == batch_size]


class PadsLastBatch(PlainTrainer):
    """The last batch is filled up from the beginning."""

    def epoch(self, count: int, batch_size: int) -> Sequence[Sequence[int]]:
        batches = [list(batch) for batch in super().epoch(count, batch_size)]
        missing = batch_size - len(batches[-1])
        return [*batches[:-1], [*batches[-1], *batches[0][:missing]]]


class OtherNames(PlainTrainer):
    """Gradients by the names of a wrapper."""

    def gradients(self) -> Mapping[str, Tensor]:
        return {f"module.{name}": grad for name, grad in super().gradients().items()}


class MissesParameters(PlainTrainer):
    """The gradients of biases and norms are left out."""

    def gradients(self) -> Mapping[str, Tensor]:
        return {name: grad for name, grad in super().gradients().items() if grad.dim() > 1}


class SwapsPairs(PlainTrainer):
    """Preference of the rejected sequence."""

    def gap(self, preferred: TrainSequence, rejected: TrainSequence, loss: PolicyLoss) -> Tensor:
        return super().gap(rejected, preferred, loss)


class ForgetsReference(PlainTrainer):
    """Log-ratios without the reference."""

    def reference(self, row: TrainSequence) -> Tensor:
        return torch.zeros(len(row.input_ids) - 1)


class IgnoresBeta(PlainTrainer):
    """Log-ratios without beta."""

    def beta(self, loss: PolicyLoss) -> float:
        return 1.0


class MeanOfTokens(PlainTrainer):
    """Means of log-ratios over the trained tokens."""

    def log_ratio(self, row: TrainSequence) -> Tensor:
        return super().log_ratio(row) / row.loss_mask[1:].sum()


class ScoresFirstToken(PlainTrainer):
    """The score of the first token."""

    def score(self, row: TrainSequence) -> Tensor:
        return self.scores(row)[0]


class ScoresBeforePadding(PlainTrainer):
    """The score of the last token but padding, which is EOS as well."""

    def score(self, row: TrainSequence) -> Tensor:
        return self.scores(row)[(row.input_ids != 1).nonzero()[-1, 0]]


class TakesAnyPairs(PlainTrainer):
    """Pairs of any neighbours, without a last single sequence."""

    def check_pairs(self, rows: Sequence[TrainSequence]) -> None:
        """Nothing to refuse."""


class AgreementOfLastMicroBatch(PlainTrainer):
    """The share of preferred pairs in the last micro-batch."""

    def clipped_fraction(self, clipped: Sequence[Tensor], cut: MicroBatches) -> float:
        last = clipped if not self.setup.loss.pairwise else clipped[-(cut.sequences or len(clipped)) :]
        return super().clipped_fraction(last, cut)


class LeavesOutScale(PlainTrainer):
    """An adapter without ``alpha / rank``."""

    def adapted(self, model: Any, path: str) -> Any:
        adapted = super().adapted(model, path)
        for module in adapted.modules():
            if isinstance(module, LoraLayer):
                module.scaling["default"] = 1.0
        return adapted


class TrainsBase(PlainTrainer):
    """The model is trained with its adapter."""

    def adapted(self, model: Any, path: str) -> Any:
        return super().adapted(model, path).requires_grad_(True)


class NoLoss(PlainTrainer):
    """Metrics without the loss."""

    def train_batch(
        self, sequences: Sequence[TrainSequence], cut: MicroBatches, apply: bool = True
    ) -> Mapping[str, float]:
        super().train_batch(sequences, cut, apply)
        return {}


class ClampsLogRatios(PlainTrainer):
    """Log-ratios are clamped to 5 before ``exp``."""

    limit = 5.0

    def ratios(self, logprobs: Tensor, old: Tensor, mask: Tensor, loss: PolicyLoss) -> Tensor:
        return super().ratios(logprobs, old, mask, loss).log().clamp(-self.limit, self.limit).exp()


class LeastRatio(PlainTrainer):
    """Ratios are at least 0.01."""

    def ratios(self, logprobs: Tensor, old: Tensor, mask: Tensor, loss: PolicyLoss) -> Tensor:
        return super().ratios(logprobs, old, mask, loss).clamp(min=0.01)


class MostRatio(PlainTrainer):
    """Ratios are at most 100."""

    def ratios(self, logprobs: Tensor, old: Tensor, mask: Tensor, loss: PolicyLoss) -> Tensor:
        return super().ratios(logprobs, old, mask, loss).clamp(max=100.0)


class ZeroIsMissing(PlainTrainer):
    """A log-prob of 0 of the old policy is taken for none."""

    def ratios(self, logprobs: Tensor, old: Tensor, mask: Tensor, loss: PolicyLoss) -> Tensor:
        return super().ratios(logprobs, torch.where(old == 0, logprobs.detach(), old), mask, loss)


class ClampsAdvantages(PlainTrainer):
    """Advantages are clamped to 5."""

    def aligned(self, advantages: Tensor) -> Tensor:
        return super().aligned(advantages).clamp(-5.0, 5.0)


class ClampsDivergence(PlainTrainer):
    """Estimates of the divergence are clamped to 10, as verl does with k3."""

    def divergence(self, logprobs: Tensor, reference: Tensor, loss: PolicyLoss) -> Tensor:
        return super().divergence(logprobs, reference, loss).clamp(-10.0, 10.0)


class ClampsReference(PlainTrainer):
    """Log-ratios to the reference are clamped to 20 on one side."""

    def divergence(self, logprobs: Tensor, reference: Tensor, loss: PolicyLoss) -> Tensor:
        return super().divergence((logprobs - reference).clamp(max=20.0), torch.zeros_like(reference), loss)


class ClampsGap(PlainTrainer):
    """The gap of log-ratios is clamped to 5."""

    def gap(self, preferred: TrainSequence, rejected: TrainSequence, loss: PolicyLoss) -> Tensor:
        return super().gap(preferred, rejected, loss).clamp(-5.0, 5.0)


class EntropyAtOne(PlainTrainer):
    """The entropy is that at temperature 1."""

    def entropy(self, log_p: Tensor) -> Tensor:
        return super().entropy((log_p * self.setup.loss.temperature).log_softmax(-1))


class EntropyAtSquare(PlainTrainer):
    """Logits of the entropy are divided by the temperature twice."""

    def entropy(self, log_p: Tensor) -> Tensor:
        return super().entropy((log_p / self.setup.loss.temperature).log_softmax(-1))


class DivergenceAtOne(PlainTrainer):
    """The divergence is that of the policy at temperature 1."""

    def at_temperature(self, logits: Tensor, temperature: float) -> Tensor:
        self.logits = logits
        return super().at_temperature(logits, temperature)

    def terms(
        self, row: TrainSequence, advantages: Tensor, loss: PolicyLoss, clipped: list[Tensor]
    ) -> Tensor:
        self.ids = row.input_ids[1:]
        return super().terms(row, advantages, loss, clipped)

    def divergence(self, logprobs: Tensor, reference: Tensor, loss: PolicyLoss) -> Tensor:
        cold = self.logits.log_softmax(-1).gather(1, self.ids[:, None])[:, 0]
        return super().divergence(cold, reference, loss)


class SkipsEqualGroups(PlainTrainer):
    """Groups of equal rewards are left out, and their KL and entropy with them; the divisor counts them."""

    def terms(
        self, row: TrainSequence, advantages: Tensor, loss: PolicyLoss, clipped: list[Tensor]
    ) -> Tensor:
        terms = super().terms(row, advantages, loss, clipped)
        return terms if advantages.any() else terms * 0.0


class DropsEqualGroups(SkipsEqualGroups):
    """The same before the batch is counted."""

    def weight(self, rows: Rows, loss: PolicyLoss) -> float:
        return super().weight([(row, values) for row, values in rows if values.any()], loss)


class DividesDivergenceByUnequalGroups(PlainTrainer):
    """Groups of equal rewards are not in the divisor of the KL term."""

    def loss_of(self, batch: Rows, loss: PolicyLoss, rows: Rows, part: Rows, clipped: list[Tensor]) -> Tensor:
        unequal = [(row, values) for row, values in rows if values.any()]
        self.scale = self.weight(rows, loss) / self.weight(unequal, loss)
        return super().loss_of(batch, loss, rows, part, clipped)

    def divergence(self, logprobs: Tensor, reference: Tensor, loss: PolicyLoss) -> Tensor:
        return super().divergence(logprobs, reference, loss) * self.scale


class SkipsZeroLoss(PlainTrainer):
    """A micro-batch whose loss is 0 has no backward pass."""

    def loss_of(self, batch: Rows, loss: PolicyLoss, rows: Rows, part: Rows, clipped: list[Tensor]) -> Tensor:
        value = super().loss_of(batch, loss, rows, part, clipped)
        return value if float(value.detach()) else value * 0.0


class SkipsCancellingAdvantages(PlainTrainer):
    """A sequence whose advantages add up to 0 is left out."""

    def terms(
        self, row: TrainSequence, advantages: Tensor, loss: PolicyLoss, clipped: list[Tensor]
    ) -> Tensor:
        terms = super().terms(row, advantages, loss, clipped)
        return terms if float(advantages[row.loss_mask].sum()) else terms * 0.0


class OneRate(PlainTrainer):
    """The first step after a load has the config's rate."""

    def load(self, path: str) -> None:
        super().load(path)
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"]


class LinearDecay(PlainTrainer):
    """A cosine that is linear: the trainer reads the type of the schedule nowhere."""

    def factor(self, step: int) -> float:
        schedule = self.setup.schedule
        self.setup = replace(self.setup, schedule=replace(schedule, type="linear"))
        factor = super().factor(step)
        self.setup = replace(self.setup, schedule=schedule)
        return factor


class CosineDecay(PlainTrainer):
    """A linear fall that is a cosine."""

    def factor(self, step: int) -> float:
        factor = super().factor(step)
        schedule = self.setup.schedule
        falls = schedule.type == "linear" and step >= schedule.warmup_steps
        return math.sin(math.pi / 2 * factor) ** 2 if falls else factor


class IgnoresSeed(PlainTrainer):
    """One order for all seeds."""

    def epoch(self, count: int, batch_size: int) -> Sequence[Sequence[int]]:
        self.setup = replace(self.setup, seed=0)
        return super().epoch(count, batch_size)


class ShufflesAnew(PlainTrainer):
    """Another order in each run, whatever the seed."""

    runs = 0

    def epoch(self, count: int, batch_size: int) -> Sequence[Sequence[int]]:
        ShufflesAnew.runs += 1
        self.setup = replace(self.setup, seed=ShufflesAnew.runs)
        return super().epoch(count, batch_size)


MUTANTS = [
    (ClampsLogRatios, "T1.clipped", "log-ratios are clamped to 5"),
    (ClampsLogRatios, "T1.gspo", "log-ratios are clamped to 5"),
    (LeastRatio, "T1.clipped", "differ"),
    (LeastRatio, "T1.dual-clipped", "differ"),
    (MostRatio, "T1.clipped", "differ"),
    (ZeroIsMissing, "T1.clipped", "differ"),
    (ZeroIsMissing, "T1.gspo", "differ"),
    (ClampsAdvantages, "T1.reinforce", "differ"),
    (ClampsAdvantages, "T1.cispo", "differ"),
    (ClampsGap, "T1.dpo", "differ"),
    (ClampsDivergence, "T2.kl", "differ"),
    (ClampsReference, "T2.kl", "differ"),
    (DivergenceAtOne, "T2.kl", "differ"),
    (EntropyAtOne, "T2.entropy", "the entropy is that at temperature 1"),
    (EntropyAtSquare, "T2.entropy", "the entropy is that at temperature T times T"),
    (SkipsZeroLoss, "T4.zero-loss", "differ"),
    (SkipsCancellingAdvantages, "T4.zero-loss", "differ"),
    (SkipsEqualGroups, "T5.advantages", "differ"),
    (DropsEqualGroups, "T5.advantages", "groups of equal rewards are left out"),
    (DividesDivergenceByUnequalGroups, "T5.advantages", "not in the divisor of the KL term"),
    (LinearDecay, "T6.steps", "the learning rate of step 3"),
    (CosineDecay, "T7.resume", "the learning rate of step 3"),
    (OneRate, "T7.resume", "the learning rate of step 3"),
    (IgnoresSeed, "T8.epochs", "the seeds 0 and 1 give one order"),
    (ShufflesAnew, "T8.epochs", "two epochs of the seed 0 differ"),
    (WeighedImitation, "T1.cross-entropy", "differ"),
    (AdvantagesOneEarly, "T1.reinforce", "differ"),
    (OneClipBound, "T1.clipped", "both clip bounds are 0.2"),
    (DualBoundForAll, "T1.dual-clipped", "differ"),
    (MeanOverAllTokens, "T1.gspo", "differ"),
    (WeightsWithGradient, "T1.cispo", "differ"),
    (MeanOfMicroBatchMeans, "T1.aggregations", "right at whole batch: it depends on the cut"),
    (LongestOfMicroBatch, "T1.aggregations", "differ"),
    (LeavesOutScale, "T1.lora", "differ"),
    (TrainsBase, "T1.lora", "unexpected"),
    (ExchangedArguments, "T2.kl", "differ"),
    (EntropyWithoutGradient, "T2.entropy", "the entropy is left out, or has no gradient"),
    (EntropyOfMicroBatch, "T2.entropy", "differ"),
    (TemperatureInBFloat16, "T2.temperature", "differ"),
    (MetricOfMicroBatches, "T3.metrics", "the metric 'micro_batches'"),
    (MeanOfRankMeans, "T3.order", "differ"),
    (UntrainedCount, "T4.untrained", "differ"),
    (FirstTokensCount, "T4.first-token", "all of them are multiplied by"),
    (BatchBaseline, "T5.advantages", "the baseline is the mean of the batch"),
    (BiasedDeviation, "T5.advantages", "differ"),
    (ClipsEachMicroBatch, "T6.clipping", "the norm of step"),
    (ReportsClippedNorm, "T6.clipping", "the norm of step 0 is 0.0"),
    (ScheduleForEachMicroBatch, "T6.steps", "the learning rate of step 1"),
    (OwnEpsilon, "T6.steps", "the loss of step 1"),
    (ForgetsSchedule, "T7.resume", "the learning rate of step 3"),
    (ForgetsMoments, "T7.resume", "differ|the loss of step"),
    (DropsLastBatch, "T8.epochs", "visits sequences so often"),
    (PadsLastBatch, "T8.epochs", "visits sequences so often"),
    (OtherNames, "T1.cross-entropy", "the tensors have other names or shapes"),
    (MissesParameters, "T1.cross-entropy", "missing: "),
    (SwapsPairs, "T1.dpo", "the rejected sequence is preferred"),
    (ForgetsReference, "T1.dpo", "the log-probs of the reference are left out"),
    (IgnoresBeta, "T1.dpo", "differ"),
    (MeanOfTokens, "T1.dpo", "log-ratios are means over tokens, not sums"),
    (SwapsPairs, "T1.bradley-terry", "the rejected sequence is preferred"),
    (ScoresFirstToken, "T1.bradley-terry", "differ"),
    (MeanOfMicroBatchMeans, "T3.pairs", "differ"),
    (ScoresBeforePadding, "T4.last-token", "differ"),
    (TakesAnyPairs, "T4.broken-pairs", "dpo took a batch with|bradley_terry took a batch with"),
    (AgreementOfLastMicroBatch, "T3.metrics", "the metric 'clipped'"),
    (NoLoss, "T1.cross-entropy", "expected a dict with a finite number 'loss'"),
]
