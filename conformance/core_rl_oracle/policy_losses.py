"""Losses of policies on one sequence, as their papers define them.

A `PolicyLoss` is at once the description that a trainer gets and the judge of its gradients: plain torch in the
dtype of its inputs, one unpacked sequence at a time. Trainers read its fields, and share no line with `of_sequence`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import get_args

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from core_rl_oracle.loss_names import PAIRWISE, Aggregation, KLEstimator, Objective
from core_rl_oracle.oracle import OracleSequence, outputs_of_partner

CLAMPS = (1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 100.0)
"""Usual clamps of log-ratios and of k3."""


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """``-objective + kl_coef * KL - entropy_coef * entropy`` of each trained token, aggregated over the batch.

    A sequence without a trained token counts nowhere, and neither does its first token, which nothing predicts.
    Of an objective of `PAIRWISE` it is the mean over pairs, and ``beta`` alone belongs to it.
    """

    objective: Objective = "clipped"
    aggregation: Aggregation = "token_mean"
    clip_low: float = 0.2
    """Ratios below ``1 - clip_low`` gain nothing."""
    clip_high: float = 0.28
    """Ratios above ``1 + clip_high`` gain nothing."""
    dual_limit: float = 3.0
    fixed_length: int = 64
    """The divisor of ``fixed_length`` for each sequence, in tokens."""
    kl_coef: float = 0.0
    kl_estimator: KLEstimator = "k3"
    kl_times_ratio: bool = False
    """Multiply the KL term by the ratio of its token, with its gradient (DeepSeek-V3.2, arXiv:2512.02556)."""
    entropy_coef: float = 0.0
    temperature: float = 1.0
    """Logits are divided by it before log-probs and entropy."""
    log_ratio_clamp: float = math.inf
    """Size to which log-ratios are clamped before ``exp``, in ratios and in k3, where the trainer documents it."""
    kl_clamp: float = math.inf
    """Largest k3 term of a token, where the trainer documents it."""
    beta: float = 0.1
    """The factor of log-ratios to the reference in DPO."""

    @property
    def pairwise(self) -> bool:
        """True for a loss on pairs of a preferred and a rejected sequence."""
        return self.objective in PAIRWISE

    def of_sequence(self, outputs: Mapping[str, Tensor], sequence: OracleSequence) -> tuple[Tensor, float]:
        """The sum over one sequence of ``L`` tokens, and how much it counts.

        ``outputs`` has ``logprobs`` and ``entropy [L]``; the sequence has the fields ``mask`` (bool), ``advantages``,
        ``old_logprobs`` and ``ref_logprobs``, each ``[L]``. A pair is the preferred sequence, with the rejected one as
        its partner.
        """
        if self.pairwise:
            return -logsigmoid(self._gap(outputs, sequence)), 1.0
        fields = sequence.fields
        mask = fields["mask"].clone()
        mask[0] = False
        count = int(mask.sum())
        if not count:
            return outputs["logprobs"].sum() * 0.0, 0.0
        logprobs = outputs["logprobs"][mask]
        terms = -self._gains(logprobs, fields["old_logprobs"][mask], fields["advantages"][mask])
        if self.kl_coef:
            divergence = self._divergence(logprobs, fields["ref_logprobs"][mask])
            if self.kl_times_ratio:
                divergence = divergence * self._ratios(logprobs - fields["old_logprobs"][mask])
            terms = terms + self.kl_coef * divergence
        if self.entropy_coef:
            terms = terms - self.entropy_coef * outputs["entropy"][mask]
        match self.aggregation:
            case "token_mean":
                return terms.sum(), float(count)
            case "sequence_mean":
                return terms.mean(), 1.0
            case "fixed_length":
                return terms.sum(), float(self.fixed_length)

    def _gap(self, outputs: Mapping[str, Tensor], preferred: OracleSequence) -> Tensor:
        """The gap of the preferred sequence to the rejected one: between scores, or between implicit rewards."""
        rejected, of_rejected = preferred.partner, outputs_of_partner(outputs)
        assert rejected is not None, "a pairwise loss takes pairs"
        if self.objective == "bradley_terry":
            return outputs["scores"] - of_rejected["scores"]
        return self.beta * (self._log_ratio(outputs, preferred) - self._log_ratio(of_rejected, rejected))

    def _log_ratio(self, outputs: Mapping[str, Tensor], sequence: OracleSequence) -> Tensor:
        """Log-ratio to the reference, of all trained tokens together."""
        mask = sequence.fields["mask"]
        return (outputs["logprobs"] - sequence.fields["ref_logprobs"])[mask].sum()

    def _gains(self, logprobs: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
        """The objective at each of the trained tokens, to be maximised."""
        low, high = 1.0 - self.clip_low, 1.0 + self.clip_high
        match self.objective:
            case "cross_entropy":
                return logprobs
            case "reinforce":
                return advantages * logprobs
            case "cispo":
                return self._ratios(logprobs.detach() - old).clamp(low, high) * advantages * logprobs
            case "gspo":
                ratios = self._ratios((logprobs - old).mean()).expand_as(logprobs)
            case _:
                ratios = self._ratios(logprobs - old)
        gains = torch.minimum(ratios * advantages, ratios.clamp(low, high) * advantages)
        if self.objective == "dual_clipped":
            gains = torch.where(advantages < 0, torch.maximum(gains, self.dual_limit * advantages), gains)
        return gains

    def _ratios(self, log_ratios: Tensor) -> Tensor:
        return log_ratios.clamp(-self.log_ratio_clamp, self.log_ratio_clamp).exp()

    def _divergence(self, logprobs: Tensor, reference: Tensor) -> Tensor:
        difference = logprobs - reference
        match self.kl_estimator:
            case "k1":
                return difference
            case "k2":
                return difference.square() / 2
            case "k3":
                difference = difference.clamp(-self.log_ratio_clamp, self.log_ratio_clamp)
                return ((-difference).exp() - 1 + difference).clamp(max=self.kl_clamp)

    def mistakes(self) -> Iterator[tuple[str, PolicyLoss]]:
        """Sentences about usual mistakes, and the loss of a trainer with each."""
        if self.objective == "dpo":
            yield "log-ratios are means over tokens, not sums", _MeanRatios(objective="dpo", beta=self.beta)
        if self.pairwise:
            return
        for other in get_args(Aggregation):
            if other != self.aggregation:
                yield f"the aggregation is {other}, not {self.aggregation}", replace(self, aggregation=other)
        if self.objective not in ("cross_entropy", "reinforce"):
            yield "ratios are not clipped", replace(self, clip_low=1.0, clip_high=1e9)
            if self.clip_low != self.clip_high:
                both = f"both clip bounds are {self.clip_low:g}, and the upper one is {self.clip_high:g}"
                yield both, replace(self, clip_high=self.clip_low)
        if self.objective in ("gspo", "dual_clipped"):
            yield f"the objective is clipped, not {self.objective}", replace(self, objective="clipped")
        yield from self._mistakes_of_terms()
        yield from self._mistaken_clamps()

    def _mistakes_of_terms(self) -> Iterator[tuple[str, PolicyLoss]]:
        if self.kl_coef:
            yield "the KL term is left out, or has no gradient", replace(self, kl_coef=0.0)
            yield "the KL term is multiplied by the ratio", replace(self, kl_times_ratio=True)
            for other in get_args(KLEstimator):
                if other != self.kl_estimator:
                    sentence = f"the KL estimator is {other}, not {self.kl_estimator}"
                    yield sentence, replace(self, kl_estimator=other)
        if self.entropy_coef:
            yield "the entropy is left out, or has no gradient", replace(self, entropy_coef=0.0)
            yield "the entropy has the other sign", replace(self, entropy_coef=-self.entropy_coef)
            if self.temperature != 1.0:
                for power, label in ((0, "1"), (2, "T times T")):
                    wrong = _EntropyAt(power=power, **vars(self))
                    yield f"the entropy is that at temperature {label}", wrong
        if self.temperature != 1.0:
            yield f"the temperature {self.temperature:g} is left out", replace(self, temperature=1.0)

    def _mistaken_clamps(self) -> Iterator[tuple[str, PolicyLoss]]:
        if self.log_ratio_clamp < math.inf:
            sentence = f"log-ratios are not clamped to {self.log_ratio_clamp:g}, as the spec says"
            yield sentence, replace(self, log_ratio_clamp=math.inf)
        for limit in CLAMPS:
            if limit < self.log_ratio_clamp:
                sentence = (
                    f"log-ratios are clamped to {limit:g}; if documented, 'log_ratio_clamp' of the spec"
                )
                yield sentence, replace(self, log_ratio_clamp=limit)
            if limit < self.kl_clamp and self.kl_coef:
                sentence = f"k3 is clamped to {limit:g}; if documented, 'kl_clamp' of the spec"
                yield sentence, replace(self, kl_clamp=limit)


@dataclass(frozen=True, kw_only=True)
class _EntropyAt(PolicyLoss):
    """An entropy of logits that are divided by a power of the temperature."""

    power: int

    def of_sequence(self, outputs: Mapping[str, Tensor], sequence: OracleSequence) -> tuple[Tensor, float]:
        log_p = (outputs["logits"] * self.temperature ** (1 - self.power)).log_softmax(-1)
        return super().of_sequence({**outputs, "entropy": -(log_p.exp() * log_p).sum(-1)}, sequence)


@dataclass(frozen=True, kw_only=True)
class _MeanRatios(PolicyLoss):
    """DPO with the mean over tokens in place of the sum."""

    def _log_ratio(self, outputs: Mapping[str, Tensor], sequence: OracleSequence) -> Tensor:
        return super()._log_ratio(outputs, sequence) / sequence.fields["mask"].sum()
