"""Inference engines whose answers and scores differ from those of another engine with the same weights."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from core_rl.backend.inference_backend import TopLogprobs
from core_rl.data.batch import SequenceBatch
from core_rl.data.requests import SamplingParams
from core_rl.reference.rollout import ReferenceRolloutBackend
from mutants.rollout_draws import Sampling
from mutants.rollouts import ReportsGreedyAsCertain
from mutants.zoo import Mutant


@Mutant(
    "I7.pair-scores",
    "log-probs that cross the wire in half precision",
    r"is off the oracle: scores at temperature 1[\s\S]*fix 'scores-rounded-to-half'",
)
class ScoresRoundedToHalf(ReferenceRolloutBackend):
    """Scores are rounded to bfloat16 on their way."""

    def score(self, batch: SequenceBatch, temperature: float) -> Tensor:
        return super().score(batch, temperature).to(torch.bfloat16).float()


@Mutant("I7.pair-scores", "TRL #4159", "is off the oracle: top 5 log-probs at temperature 1")
class TopOverItsOwn(ReferenceRolloutBackend):
    """A few top tokens come with a softmax over these alone."""

    def top_logprobs(self, batch: SequenceBatch, k: int, temperature: float) -> TopLogprobs:
        top = super().top_logprobs(batch, k, temperature)
        renormalized = torch.log_softmax(top.logprobs, -1)
        renormalized[batch.cu_seqlens[:-1].long()] = 0.0
        return replace(top, logprobs=renormalized)


@Mutant(
    "I7.pair-scores",
    "an error that likely tokens cannot show (I8)",
    "is off the oracle: log-probs of all tokens",
)
class ClampsUnlikelyTokens(ReferenceRolloutBackend):
    """No reported log-prob is below a limit."""

    def top_logprobs(self, batch: SequenceBatch, k: int, temperature: float) -> TopLogprobs:
        top = super().top_logprobs(batch, k, temperature)
        return replace(top, logprobs=top.logprobs.clamp(min=-9.0))


@Mutant(
    "I8.pair-greedy",
    "defaults of a generation config (I8)",
    "is off the oracle: the oracle's log-probs of greedy tokens",
)
class PenalizesGreedyRepetition(Sampling):
    """Greedy decoding takes the repetition penalty of the generation config."""

    def _drawn_with(self, sampling: SamplingParams) -> SamplingParams:
        return replace(sampling, repetition_penalty=1.3) if sampling.greedy else sampling


@Mutant(
    "I8.pair-greedy",
    "a tiny temperature in place of greedy decoding (I8)",
    "is off the oracle: log-probs of greedy tokens",
)
class GreedyTokensAreCertain(ReportsGreedyAsCertain):
    """Greedy tokens come with log-probs at a tiny temperature."""
