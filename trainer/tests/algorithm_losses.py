"""Plain losses in float64 for the tests of algorithms: one sequence and one token at a time, from the papers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import torch
from algorithm_support import trained_rows

from core_rl.data.batch import SequenceBatch
from core_rl.data.outputs import ModelOutput
from core_rl_trainer.algorithms import objectives
from core_rl_trainer.algorithms.aggregation import Aggregation, FixedLength
from core_rl_trainer.algorithms.objectives import PolicyLoss


def policy_output(batch: SequenceBatch, seed: int = 5) -> ModelOutput:
    """Log-probs near the behaviour policy's, some of them beyond the clip range, that take gradients."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(batch.num_tokens, generator=generator, dtype=torch.float64)
    logprobs = (batch["logprobs"] + 0.4 * noise).clone().requires_grad_(True)
    entropy = torch.rand(batch.num_tokens, generator=generator, dtype=torch.float64).requires_grad_(True)
    return ModelOutput(logprobs=logprobs, entropy=entropy)


def plain_mean(values: Sequence[float], batch: SequenceBatch, how: Aggregation) -> float:
    rows = [[values[t] for t in row] for row in trained_rows(batch) if row]
    if isinstance(how, FixedLength):
        return sum(value for row in rows for value in row) / (len(rows) * how.fixed_length)
    if how == "token_mean":
        return statistics.fmean([value for row in rows for value in row])
    return statistics.fmean([statistics.fmean(row) for row in rows])


def plain_objective(
    objective: objectives.Objective,
    new: list[float],
    old: list[float],
    advantages: list[float],
    row: list[int],
) -> list[float]:
    """The objective at the trained tokens ``row`` of one sequence."""
    logs = [new[t] - old[t] for t in row]
    gains = [advantages[t] for t in row]
    match objective:
        case objectives.Clipped():
            return [
                _clip(math.exp(r), a, objective.clip_low, objective.clip_high)
                for r, a in zip(logs, gains, strict=True)
            ]
        case objectives.DualClipped():
            values = []
            for r, a in zip(logs, gains, strict=True):
                value = _clip(math.exp(r), a, objective.clip_low, objective.clip_high)
                values.append(max(value, objective.limit * a) if a < 0 else value)
            return values
        case objectives.GSPO():
            ratio = math.prod(math.exp(r) for r in logs) ** (1 / len(logs))
            return [_clip(ratio, a, objective.clip_low, objective.clip_high) for a in gains]
        case objectives.SequenceClipped():
            ratio = math.prod(math.exp(r) for r in logs)
            return [_clip(ratio, a, objective.clip_low, objective.clip_high) for a in gains]
        case objectives.Reinforce():
            return [a * new[t] for a, t in zip(gains, row, strict=True)]
    raise AssertionError(objective)


def plain_cispo_gradient(
    objective: objectives.CISPO, new: list[float], old: list[float], advantages: list[float], t: int
) -> float:
    """The factor of the log-prob of token ``t``."""
    ratio = math.exp(new[t] - old[t])
    return max(min(ratio, 1 + objective.clip_high), 1 - objective.clip_low) * advantages[t]


def plain_policy_loss(
    logprobs: torch.Tensor, entropy: torch.Tensor, batch: SequenceBatch, loss: PolicyLoss
) -> float:
    """The whole loss, with the token fields that ``batch`` has."""
    new, entropies = logprobs.tolist(), entropy.tolist()
    old, ref, advantages = (batch[name].tolist() for name in ("prox_logprobs", "ref_logprobs", "advantages"))
    weights = batch["importance_weights"].tolist() if "importance_weights" in batch else [1.0] * len(new)
    values = [0.0] * len(new)
    for row in trained_rows(batch):
        if not row:
            continue
        for t, gain in zip(row, plain_objective(loss.objective, new, old, advantages, row), strict=True):
            r = math.exp(ref[t] - new[t])
            kl = {"k1": -math.log(r), "k2": math.log(r) ** 2 / 2, "k3": r - 1 - math.log(r)}[
                loss.kl_estimator
            ]
            values[t] = -weights[t] * gain + loss.kl_coef * kl - loss.entropy_coef * entropies[t]
    return plain_mean(values, batch, loss.objective.aggregation)


def _clip(ratio: float, advantage: float, low: float, high: float) -> float:
    return min(ratio * advantage, max(min(ratio, 1 + high), 1 - low) * advantage)
