"""Inference engines that report or draw something else than the contract requires."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import TopKLogitsWarper, TopPLogitsWarper

from core_rl.backend.inference_backend import TopLogprobs
from core_rl.data.batch import SequenceBatch
from core_rl.data.requests import LLMRequest, LLMResponse, SamplingParams
from core_rl.reference.rollout import ReferenceRolloutBackend
from core_rl.reference.sampling import Adjustment, Completion, generate
from mutants.zoo import Mutant

Entries = Sequence[tuple[LLMRequest, Future[LLMResponse]]]


# ----------------------------------------------------------- reported values


class Rescored(ReferenceRolloutBackend):
    """Log-probs come from a pass of their own."""

    def _response(self, request: LLMRequest, completion: Completion) -> LLMResponse:
        ids = torch.tensor([[*request.input_ids, *completion.ids]])
        with torch.inference_mode():
            logits = self._model(input_ids=ids, use_cache=False).logits[0].float()
        size = len(request.input_ids)
        adjust = Adjustment(sampling=request.sampling, start=size)
        pairs = enumerate(logits[size - 1 : -1].split(1), start=size)
        rows = torch.cat([adjust(ids[:, :end], row) for end, row in pairs])
        log_p = torch.log_softmax(self._reported(rows, request.sampling), -1)
        drawn = log_p.gather(1, torch.tensor(completion.ids)[:, None]).squeeze(1)
        return super()._response(request, replace(completion, logprobs=tuple(drawn.tolist())))

    def _reported(self, logits: Tensor, sampling: SamplingParams) -> Tensor:
        """The logits ``[n, V]`` whose softmax is reported."""
        return logits / sampling.logprob_temperature


@Mutant(
    "I8.rollout-temperature",
    "NeMo-RL #316, verl #3133, OpenRLHF #857, TRL #3029, AReaL #581, slime #557",
    "the temperature is missing",
)
class ReportsWithoutTemperature(Rescored):
    """Log-probs are those before the temperature."""

    def _reported(self, logits: Tensor, sampling: SamplingParams) -> Tensor:
        return logits


@Mutant(
    "I8.rollout-temperature",
    "a tiny temperature in place of greedy decoding (I8)",
    "log-probs of greedy tokens",
)
class ReportsGreedyAsCertain(Rescored):
    """Greedy decoding is a softmax at a tiny temperature, and its log-probs are reported."""

    def _reported(self, logits: Tensor, sampling: SamplingParams) -> Tensor:
        return logits / (sampling.temperature or 1e-5)


@Mutant("I8.sampling-pairs", "TRL #4159", "what the cut has left")
class ReportsAfterTheCut(Rescored):
    """Log-probs are renormalized over the tokens left by top-k and top-p."""

    def _reported(self, logits: Tensor, sampling: SamplingParams) -> Tensor:
        logits = logits / sampling.logprob_temperature
        none = torch.zeros(len(logits), 1, dtype=torch.long)
        if sampling.top_k is not None:
            logits = TopKLogitsWarper(sampling.top_k)(none, logits)
        if sampling.top_p < 1:
            logits = TopPLogitsWarper(sampling.top_p)(none, logits)
        # A drawn token that rounding has cut away still needs a finite log-prob.
        return logits.clamp(min=-1e4)


@Mutant("I7.rollout-logprobs", "verl #3287, SkyRL #1304", "(position|token) (too late|before it)")
class ReportsOneTokenLate(ReferenceRolloutBackend):
    """The log-prob of each token is that of the token before it."""

    def _response(self, request: LLMRequest, completion: Completion) -> LLMResponse:
        late = (-1.0, *completion.logprobs[:-1])
        return super()._response(request, replace(completion, logprobs=late))


# ----------------------------------------------------------- inputs


class Feeding(ReferenceRolloutBackend):
    """The model sees something else than the prompt."""

    def _fed(self, ids: tuple[int, ...], longest: int) -> tuple[int, ...]:
        raise NotImplementedError

    def _complete(self, entries: Entries) -> None:
        requests = [request for request, _ in entries]
        longest = max(len(request.input_ids) for request in requests)
        fed = [self._fed(request.input_ids, longest) for request in requests]
        seeds = [self._seed(request.sampling) for request in requests]
        result = generate(self._model, fed, requests[0].sampling, seeds, self._eos_token_ids)
        for (request, future), answer in zip(entries, result, strict=True):
            future.set_result(self._response(request, answer))


@Mutant("I7.rollout-logprobs", "OpenRLHF #217", "generated in a crowd")
class SeesPaddingOfTheBatch(Feeding):
    """Prompts are padded to the longest of the batch, without a mask."""

    def _fed(self, ids: tuple[int, ...], longest: int) -> tuple[int, ...]:
        return (0,) * (longest - len(ids)) + ids


@Mutant("I19.bos", "a second BOS (I19)", "extra BOS")
class AddsBos(Feeding):
    """The server puts BOS before every prompt, as a tokenizer would."""

    def _fed(self, ids: tuple[int, ...], longest: int) -> tuple[int, ...]:
        return (self._model.config.bos_token_id, *ids)


@Mutant("I19.bos", "a prompt that loses its BOS (I19)", "prompts with BOS")
class StripsBos(Feeding):
    """A BOS that the prompt has is taken away, as decoding and encoding again would."""

    def _fed(self, ids: tuple[int, ...], longest: int) -> tuple[int, ...]:
        stripped = ids[1:] if ids[0] == self._model.config.bos_token_id else ids
        return stripped or ids


# ----------------------------------------------------------- scores


@Mutant("I7.score", "NeMo-RL #316", "scores at temperature 0.6")
class ScoresWithoutTemperature(ReferenceRolloutBackend):
    """Scores are those at temperature 1."""

    def score(self, batch: SequenceBatch, temperature: float) -> Tensor:
        return super().score(batch, 1.0)


@Mutant("I7.score", "SkyRL #1304", "scores at temperature 1")
class ScoresOneTokenEarly(ReferenceRolloutBackend):
    """Each sequence's scores begin at its first token."""

    def score(self, batch: SequenceBatch, temperature: float) -> Tensor:
        rows = super().score(batch, temperature).split(batch.lengths)
        early = torch.cat([F.pad(row[1:], (0, 1)) for row in rows])
        early[batch.cu_seqlens[:-1].long()] = 0.0
        return early


@Mutant(
    "I7.score", "tensors of a driver in the same process (I7)", r"score\(\) changed input_ids of the caller's"
)
class ScoresInPlace(ReferenceRolloutBackend):
    """The first id of the caller's batch is cleared."""

    def score(self, batch: SequenceBatch, temperature: float) -> Tensor:
        scores = super().score(batch, temperature)
        batch.input_ids[0] = 0
        return scores


@Mutant("I7.score", "a least temperature of samplers (I7)", r"scores at temperature 0\.05")
class ScoresAtLeastAtATenth(ReferenceRolloutBackend):
    """Temperatures below 0.1 count as 0.1."""

    def score(self, batch: SequenceBatch, temperature: float) -> Tensor:
        return super().score(batch, max(temperature, 0.1))


@Mutant("I7.score", "batches of 64 (I7)", "scores of 65 short sequences")
class ForgetsTheLastBatch(ReferenceRolloutBackend):
    """Beyond 64 sequences, a remaining sequence is scored as the sequence before it."""

    def score(self, batch: SequenceBatch, temperature: float) -> Tensor:
        rows = list(super().score(batch, temperature).split(batch.lengths))
        for number in range(64, len(rows)):
            rows[number] = torch.zeros_like(rows[number])
        return torch.cat(rows)


@Mutant("I7.rollout-logprobs", "slots of 64 requests (I7)", "64 has those of 63")
class GivesTheLastSlotTwice(ReferenceRolloutBackend):
    """With more than 64 requests in flight, one gets the log-probs of another."""

    _running = 0
    _last: tuple[float, ...] | None = None

    async def agenerate(self, request: LLMRequest) -> LLMResponse:
        self._running += 1
        place = self._running
        try:
            response = await super().agenerate(request)
        finally:
            self._running -= 1
        if place == 64:
            self._last = response.logprobs
        return replace(response, logprobs=self._last) if place > 64 and self._last else response


@Mutant("I7.top-logprobs", "TRL #3029", "at temperature 0.6")
class TopWithoutTemperature(ReferenceRolloutBackend):
    """The most likely tokens come with their log-probs at temperature 1."""

    def top_logprobs(self, batch: SequenceBatch, k: int, temperature: float) -> TopLogprobs:
        return super().top_logprobs(batch, k, 1.0)


@Mutant("I7.top-logprobs", "ids and values of two orders (I7)", "ids that came")
class TopInOrderOfIds(ReferenceRolloutBackend):
    """The most likely tokens come in the order of their ids, log-probs in that of their size."""

    def top_logprobs(self, batch: SequenceBatch, k: int, temperature: float) -> TopLogprobs:
        top = super().top_logprobs(batch, k, temperature)
        return replace(top, ids=top.ids.sort(-1).values)
