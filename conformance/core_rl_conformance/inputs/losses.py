"""The losses of the checks, each written twice: for engines (`LossSpec`) and for the oracle (plain torch).

Both forms are frozen dataclasses without state, so they travel to ranks, and results can be kept by them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from core_rl.backend.loss import LossSpec, count_sequences, count_tokens
from core_rl.backend.metrics import Metric
from core_rl.data.batch import SequenceBatch
from core_rl.data.outputs import ModelOutput, OutputName, masked_fill, masked_sum, segment_sum
from core_rl_oracle.experts import Choice, balance
from core_rl_oracle.oracle import OracleSequence

EngineResult = tuple[Tensor, Mapping[str, Metric]]
Outputs = Mapping[str, Tensor]


def wrong_temperatures(temperature: float) -> Iterator[tuple[str, float]]:
    """Sentences about known mistakes with a temperature other than 1, and the one at which each computes."""
    if temperature != 1.0:
        yield f"the temperature {temperature:g} is left out", 1.0
        yield (
            f"logits are multiplied by the temperature {temperature:g}, not divided by it",
            1.0 / temperature,
        )
        yield f"logits are divided by the temperature {temperature:g} twice", temperature**2


@dataclass(frozen=True, kw_only=True)
class CheckLoss(ABC):
    """A loss in both forms, with the temperature of its log-probs."""

    temperature: float = 1.0
    outputs: ClassVar[tuple[OutputName, ...]]
    """The outputs that it reads."""

    def spec(self) -> LossSpec:
        """For an engine."""
        return LossSpec(fn=self, weight_fn=self.weight, outputs=self.outputs, temperature=self.temperature)

    def mistakes(self, right: Sequence[Outputs]) -> Iterator[tuple[str, CheckLoss]]:
        """Sentences about known mistakes, and the loss that an engine with each computes.

        ``right`` are the outputs of all sequences.
        """
        for sentence, wrong in wrong_temperatures(self.temperature):
            yield sentence, replace(self, temperature=wrong)

    @staticmethod
    def weight(batch: SequenceBatch) -> float:
        """The number that its sum is divided by."""
        return count_tokens(batch)

    @abstractmethod
    def __call__(self, output: ModelOutput, batch: SequenceBatch) -> EngineResult:
        """The sum over a micro-batch, and metrics."""

    @abstractmethod
    def of_sequence(self, outputs: Outputs, sequence: OracleSequence) -> tuple[Tensor, float]:
        """For the oracle and the plain model: the sum over one sequence and how much it counts."""


@dataclass(frozen=True, kw_only=True)
class TokenMeanLoss(CheckLoss):
    """The mean over trained tokens of ``-advantage * log p - coef * entropy``."""

    entropy_coef: float = 0.25
    outputs = ("logprobs", "entropy")

    def mistakes(self, right: Sequence[Outputs]) -> Iterator[tuple[str, CheckLoss]]:
        yield from super().mistakes(right)
        if self.entropy_coef:
            yield "the entropy is left out, or has no gradient", replace(self, entropy_coef=0.0)
            yield "the entropy has the other sign", replace(self, entropy_coef=-self.entropy_coef)

    def __call__(self, output: ModelOutput, batch: SequenceBatch) -> EngineResult:
        mask = batch.loss_mask
        terms = -batch["advantages"] * output["logprobs"] - self.entropy_coef * output["entropy"]
        logprobs = masked_fill(output["logprobs"], mask)
        metrics = {
            "mean_logprob": Metric.mean(logprobs.sum(), mask.sum()),
            "tokens": Metric.sum(mask.sum()),
            "lowest_logprob": Metric.min(logprobs.min()),
            "highest_entropy": Metric.max(masked_fill(output["entropy"], mask).max()),
        }
        return masked_sum(terms, mask), metrics

    def of_sequence(self, outputs: Outputs, sequence: OracleSequence) -> tuple[Tensor, float]:
        mask, advantages = sequence.fields["mask"], sequence.fields["advantages"]
        terms = -advantages * outputs["logprobs"] - self.entropy_coef * outputs["entropy"]
        return terms[mask].sum(), float(mask.sum())


@dataclass(frozen=True, kw_only=True)
class RaisingLoss(TokenMeanLoss):
    """`TokenMeanLoss` that raises `RuntimeError` in the engine's backward pass, with its forward pass complete."""

    def __call__(self, output: ModelOutput, batch: SequenceBatch) -> EngineResult:
        output["logprobs"].register_hook(_raise)
        return super().__call__(output, batch)


def _raise(gradient: Tensor) -> None:
    raise RuntimeError(f"the backward pass of this check raises, at a gradient {list(gradient.shape)}")


@dataclass(frozen=True, kw_only=True)
class RepeatedLoss(TokenMeanLoss):
    """`TokenMeanLoss` over a batch of equal sequences, which the oracle gets once with the number of copies."""

    def of_sequence(self, outputs: Outputs, sequence: OracleSequence) -> tuple[Tensor, float]:
        total, weight = super().of_sequence(outputs, sequence)
        copies = int(sequence.fields["copies"])
        return copies * total, copies * weight


@dataclass(frozen=True, kw_only=True)
class ScaledLoss(TokenMeanLoss):
    """`TokenMeanLoss` times a power of two: so are its gradients, exactly."""

    exponent: int

    def __call__(self, output: ModelOutput, batch: SequenceBatch) -> EngineResult:
        total, metrics = super().__call__(output, batch)
        return total * 2.0**self.exponent, metrics


@dataclass(frozen=True, kw_only=True)
class WatchedLoss(TokenMeanLoss):
    """`TokenMeanLoss`, whose metrics are the log-prob and the entropy of the second token of each sequence.

    A training pass has no other outputs. The field ``target`` numbers the sequences: see `watched`.
    """

    def __call__(self, output: ModelOutput, batch: SequenceBatch) -> EngineResult:
        total, _ = super().__call__(output, batch)
        metrics = {}
        for number, start in zip(batch["target"].tolist(), batch.cu_seqlens[:-1].tolist(), strict=True):
            for name in self.outputs:
                metrics[f"{name} {number:g}"] = Metric.sum(output[name][start + 1].detach())
        return total, metrics

    def watched(self, metrics: Mapping[str, float], count: int) -> Tensor:
        """Log-probs and entropies of ``count`` sequences, float64 ``[count, 2]``; NaN where they are missing."""
        rows = [
            [metrics.get(f"{name} {number}", math.nan) for name in self.outputs] for number in range(count)
        ]
        return torch.tensor(rows, dtype=torch.float64)


@dataclass(frozen=True, kw_only=True)
class BalanceLoss(CheckLoss):
    """Nothing but the balance of the routers, which an engine with ``router_aux_coef`` 1 adds by itself."""

    outputs = ("logprobs",)

    def __call__(self, output: ModelOutput, batch: SequenceBatch) -> EngineResult:
        return masked_sum(0.0 * output["logprobs"], batch.loss_mask), {}

    def spec(self) -> LossSpec:
        return LossSpec(fn=self, weight_fn=count_tokens, outputs=self.outputs)

    @staticmethod
    def weight(batch: SequenceBatch) -> float:
        return float(batch.num_tokens)

    def mistakes(self, right: Sequence[Outputs]) -> Iterator[tuple[str, CheckLoss]]:
        for sentence, change in BALANCES.items():
            yield sentence, WrongBalance(change=change)
        alike = "sequences, or micro-batches of one each, count alike, and not by their tokens"
        yield alike, WrongBalance(alike=True)
        batch = {name: torch.cat([outputs[name] for outputs in right]) for name in ROUTER}
        yield "experts are counted over the batch, and not in each sequence", WrongBalance(counted=batch)

    def of_sequence(self, outputs: Outputs, sequence: OracleSequence) -> tuple[Tensor, float]:
        return outputs["aux_loss"], float(len(sequence.input_ids))


ROUTER = ("router_logits", "routing")
Change = Callable[[Outputs, Tensor], Outputs]
"""The outputs of a mistake, from the right ones of a sequence and its mask ``[L]``."""
BALANCES: Mapping[str, Change] = {
    "only trained tokens are balanced": lambda outputs, mask: {name: outputs[name][mask] for name in ROUTER},
    "the choices of the routers count, and not the replayed ones": lambda outputs, _: {
        **outputs,
        "routing": outputs["router_logits"].topk(outputs["routing"].shape[-1], -1).indices,
    },
    "only the first choice of a token counts": lambda outputs, _: {
        **outputs,
        "routing": outputs["routing"][..., :1],
    },
    "the softmax is taken twice": lambda outputs, _: {
        **outputs,
        "router_logits": outputs["router_logits"].softmax(-1),
    },
}


@dataclass(frozen=True, kw_only=True)
class WrongBalance(BalanceLoss):
    """The same with a mistake; for the oracle only."""

    change: Change = lambda outputs, _: outputs
    counted: Outputs | None = None
    """The outputs whose choices count."""
    alike: bool = False
    """Each sequence has the same weight."""

    def of_sequence(self, outputs: Outputs, sequence: OracleSequence) -> tuple[Tensor, float]:
        changed, length = self.change(outputs, sequence.fields["mask"]), len(sequence.input_ids)
        value = balance(_choices(changed), _choices(self.counted or changed))
        return (value / length, 1.0) if self.alike else (value, float(length))


def _choices(outputs: Outputs) -> list[Choice]:
    return list(map(Choice, *(outputs[name].unbind(1) for name in ROUTER)))


@dataclass(frozen=True, kw_only=True)
class BalancedTokenMeanLoss(TokenMeanLoss):
    """`TokenMeanLoss` and the balance of the routers."""

    coef: float
    scale: float = 1.0
    """Factor of the token mean."""
    tokens_per_trained: float
    """The number of all tokens over that of the trained ones: the balance is divided by the former."""

    def mistakes(self, right: Sequence[Outputs]) -> Iterator[tuple[str, CheckLoss]]:
        yield from super().mistakes(right)
        yield "the balance has no gradient", replace(self, coef=0.0)
        yield "the balance is divided by the weight of the loss", replace(self, tokens_per_trained=1.0)
        yield "the balance alone has a gradient", replace(self, scale=0.0)

    def of_sequence(self, outputs: Outputs, sequence: OracleSequence) -> tuple[Tensor, float]:
        total, weight = super().of_sequence(outputs, sequence)
        return self.scale * total + self.coef / self.tokens_per_trained * outputs["aux_loss"], weight


@dataclass(frozen=True, kw_only=True)
class SequenceMeanLoss(CheckLoss):
    """The mean over sequences of each one's own token mean; a sequence without trained tokens counts nothing."""

    outputs = ("logprobs",)

    @staticmethod
    def weight(batch: SequenceBatch) -> float:
        return count_sequences(batch)

    def __call__(self, output: ModelOutput, batch: SequenceBatch) -> EngineResult:
        mask = batch.loss_mask
        sums = segment_sum(masked_fill(-batch["advantages"] * output["logprobs"], mask), batch.cu_seqlens)
        counts = segment_sum(mask.float(), batch.cu_seqlens)
        means = sums / counts.clamp(min=1.0)
        return means.sum(), {"sequences": Metric.sum((counts > 0).sum())}

    def of_sequence(self, outputs: Outputs, sequence: OracleSequence) -> tuple[Tensor, float]:
        mask, advantages = sequence.fields["mask"], sequence.fields["advantages"]
        if not mask.any():
            return torch.zeros(()), 0.0
        return (-advantages * outputs["logprobs"])[mask].mean(), 1.0


@dataclass(frozen=True, kw_only=True)
class OutputsLoss(CheckLoss):
    """The mean over trained tokens of ``advantage`` times a sum: of ``-log p``, entropy and the costs of the logits.

    It reads only outputs with these ``names``.
    """

    names: tuple[OutputName, ...]
    outputs = ()

    def mistakes(self, right: Sequence[Outputs]) -> Iterator[tuple[str, CheckLoss]]:
        yield from super().mistakes(right)
        for name in self.names if len(self.names) > 1 else ():
            others = tuple(other for other in self.names if other != name)
            yield f"the output {name!r} has no gradient here", replace(self, names=others)

    def spec(self) -> LossSpec:
        return LossSpec(fn=self, weight_fn=self.weight, outputs=self.names, temperature=self.temperature)

    def __call__(self, output: ModelOutput, batch: SequenceBatch) -> EngineResult:
        terms = batch["advantages"] * self._sum(dict(output.items()))
        return masked_sum(terms, batch.loss_mask), {}

    def of_sequence(self, outputs: Outputs, sequence: OracleSequence) -> tuple[Tensor, float]:
        mask = sequence.fields["mask"]
        terms = sequence.fields["advantages"] * self._sum(outputs)
        return terms[mask].sum(), float(mask.sum())

    def _sum(self, outputs: Outputs) -> Tensor:
        terms: dict[OutputName, Callable[[Tensor], Tensor]] = {
            "logprobs": torch.neg,
            "entropy": torch.clone,
            "logits": _mean_costs,
        }
        return torch.stack([terms[name](outputs[name]) for name in self.names]).sum(0)


def _mean_costs(logits: Tensor) -> Tensor:
    """The expected cost of a token under ``softmax(logits [T, V])``, and the mean of costs times logits; ``[T]``."""
    ids = torch.arange(logits.shape[-1], device=logits.device)
    # Quarters from -0.75 to 0.75: exact in every dtype.
    costs = (ids % 7 - 3).to(logits.dtype) / 4
    return (logits.softmax(-1) * costs).sum(-1) + (logits * costs).mean(-1)


@dataclass(frozen=True, kw_only=True)
class InfiniteGradientLoss:
    """A finite loss whose gradient is not finite: the square root at 0. For engines only."""

    def spec(self) -> LossSpec:
        return LossSpec(fn=self, weight_fn=count_tokens, outputs=("logprobs",))

    def __call__(self, output: ModelOutput, batch: SequenceBatch) -> EngineResult:
        logprobs = masked_sum(output["logprobs"], batch.loss_mask)
        return (logprobs - logprobs.detach()).abs().sqrt() - logprobs, {}


@dataclass(frozen=True, kw_only=True)
class ValueLoss(CheckLoss):
    """Half the squared errors of values at trained tokens and of all bootstraps, over the number of trained tokens.

    No value depends on the temperature.
    """

    outputs = ("values",)

    def __call__(self, output: ModelOutput, batch: SequenceBatch) -> EngineResult:
        mask = batch.loss_mask
        errors = output["values"] - batch["advantages"]
        ends = output["bootstrap"] - batch["target"]
        return masked_sum(0.5 * errors**2, mask) + (0.5 * ends**2).sum(), {
            "value_error": Metric.mean(masked_sum(errors, mask), mask.sum())
        }

    def of_sequence(self, outputs: Outputs, sequence: OracleSequence) -> tuple[Tensor, float]:
        mask = sequence.fields["mask"]
        errors = (outputs["values"] - sequence.fields["advantages"])[mask]
        end = outputs["bootstrap"] - sequence.fields["target"]
        return (0.5 * errors**2).sum() + 0.5 * end**2, float(mask.sum())


@dataclass(frozen=True, kw_only=True)
class RewardLoss(CheckLoss):
    """The mean over all sequences of half the squared error of the score."""

    outputs = ("scores",)

    @staticmethod
    def weight(batch: SequenceBatch) -> float:
        return float(batch.num_sequences)

    def __call__(self, output: ModelOutput, batch: SequenceBatch) -> EngineResult:
        errors = output["scores"] - batch["target"]
        return (0.5 * errors**2).sum(), {"score_error": Metric.mean(errors.sum(), len(errors))}

    def of_sequence(self, outputs: Outputs, sequence: OracleSequence) -> tuple[Tensor, float]:
        error = outputs["scores"] - sequence.fields["target"]
        return 0.5 * error**2, 1.0


@dataclass(frozen=True, kw_only=True)
class CancellingLoss(CheckLoss):
    """``loss`` less its own value: 0, with the gradient of ``loss``, as a policy loss at a ratio of 1 has.

    With ``some``, that is so in micro-batches alone whose first sequence has a positive target.
    """

    loss: CheckLoss
    some: bool = False
    outputs = ()

    def spec(self) -> LossSpec:
        of = self.loss
        return LossSpec(fn=self, weight_fn=of.weight, outputs=of.outputs, temperature=self.temperature)

    def mistakes(self, right: Sequence[Outputs]) -> Iterator[tuple[str, CheckLoss]]:
        for sentence, wrong in self.loss.mistakes(right):
            yield sentence, replace(self, loss=wrong, temperature=wrong.temperature)

    def __call__(self, output: ModelOutput, batch: SequenceBatch) -> EngineResult:
        total, metrics = self.loss(output, batch)
        cancels = not self.some or float(batch["target"][0]) > 0
        return total - total.detach() if cancels else total, metrics

    def of_sequence(self, outputs: Outputs, sequence: OracleSequence) -> tuple[Tensor, float]:
        total, weight = self.loss.of_sequence(outputs, sequence)
        return total - total.detach(), weight
