"""Inference engines whose sampling options are right one at a time, and wrong with each other."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from core_rl.data.requests import LLMRequest, LLMResponse, SamplingParams
from core_rl.reference import sampling
from core_rl.reference.rollout import ReferenceRolloutBackend
from core_rl.reference.sampling import Adjustment, Completion, GumbelSampler
from mutants.rollouts import Entries
from mutants.zoo import Mutant

CHECK = "I8.sampling-pairs"


class Replaced(ReferenceRolloutBackend):
    """Parts of the sampler are replaced."""

    adjustment: type[Adjustment] = Adjustment
    sampler: type[GumbelSampler] = GumbelSampler

    def _complete(self, entries: Entries) -> None:
        with (
            patch.object(sampling, "Adjustment", self.adjustment),
            patch.object(sampling, "GumbelSampler", self.sampler),
        ):
            super()._complete(entries)


class Ordered(GumbelSampler):
    """Temperature and cuts in another order."""

    order: tuple[type, ...]

    def __init__(self, sampling: SamplingParams, seeds: Sequence[int]) -> None:
        super().__init__(sampling, seeds)
        self._warpers.sort(key=lambda warper: self.order.index(type(warper)))


@Mutant(CHECK, "vLLM's and SGLang's joint cuts (I8)", "each cut counts the tokens")
class TopPBeforeTopK(Replaced):
    """Top-p counts the tokens that top-k drops."""

    class sampler(Ordered):  # noqa: N801
        order = (TemperatureLogitsWarper, TopPLogitsWarper, TopKLogitsWarper, MinPLogitsWarper)


@Mutant(CHECK, "the order of temperature and min-p (I8)", "do not reach the cut")
class MinPBeforeTemperature(Replaced):
    """Min-p counts probabilities at temperature 1."""

    class sampler(Ordered):  # noqa: N801
        order = (MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper)


@Mutant(CHECK, "the order of top-p and min-p (I8)", "min_p cuts before top_p")
class MinPBeforeTopP(Replaced):
    """Top-p counts what min-p has left."""

    class sampler(Ordered):  # noqa: N801
        order = (TemperatureLogitsWarper, TopKLogitsWarper, MinPLogitsWarper, TopPLogitsWarper)


@Mutant(CHECK, "a kernel of top-k and top-p alone (I8)", "min_p has no effect")
class TopKAndTopPWithoutMinP(Replaced):
    """A request with top-k and top-p is drawn without min-p."""

    class sampler(GumbelSampler):  # noqa: N801
        def __init__(self, sampling: SamplingParams, seeds: Sequence[int]) -> None:
            both = sampling.top_k is not None and sampling.top_p < 1
            super().__init__(replace(sampling, min_p=0.0) if both else sampling, seeds)


class Biased(Adjustment):
    """Penalties and biases in turn."""

    def penalized(self, input_ids: Tensor, logits: Tensor) -> Tensor:
        return Adjustment(sampling=replace(self.sampling, logit_bias=()), start=self.start)(input_ids, logits)

    def biased(self, logits: Tensor, factor: float = 1.0) -> Tensor:
        logits = logits.clone()
        for token, bias in self.sampling.logit_bias:
            logits[:, token] += factor * bias
        return logits


@Mutant(CHECK, "the order of bias and penalties (I8)", "logit_bias, repetition_penalty, in this order")
class BiasBeforePenalties(Replaced):
    """Penalties scale the added bias as well."""

    class adjustment(Biased):  # noqa: N801
        def __call__(self, input_ids: Tensor, logits: Tensor) -> Tensor:
            return self.penalized(input_ids, self.biased(logits))


@Mutant(CHECK, "the order of bias and temperature (I8)", "the temperature does not divide")
class BiasAfterTemperature(Replaced):
    """The temperature does not divide the bias."""

    class adjustment(Biased):  # noqa: N801
        def __call__(self, input_ids: Tensor, logits: Tensor) -> Tensor:
            return self.biased(self.penalized(input_ids, logits), self.sampling.logprob_temperature)


@Mutant(CHECK, "SGLang #8734: a bias of the first token alone (I8)", "log-probs without logit_bias")
class BiasesTheFirstToken(Replaced):
    """The bias is gone after the first token of a response."""

    class adjustment(Biased):  # noqa: N801
        def __call__(self, input_ids: Tensor, logits: Tensor) -> Tensor:
            changed = self.penalized(input_ids, logits)
            return changed if input_ids.shape[1] > self.start else self.biased(changed)


@Mutant(
    "I8.sampling-threes",
    "the order of two penalties (I8)",
    "repetition_penalty, presence_penalty, logit_bias, in this order",
)
class RepetitionBeforePresence(Replaced):
    """The presence penalty is subtracted after the repetition penalty has scaled."""

    class adjustment(Adjustment):  # noqa: N801
        def __call__(self, input_ids: Tensor, logits: Tensor) -> Tensor:
            bare = replace(self.sampling, logit_bias=())
            scaled = Adjustment(sampling=replace(bare, presence_penalty=0.0), start=self.start)
            rest = Adjustment(sampling=replace(self.sampling, repetition_penalty=1.0), start=self.start)
            return rest(input_ids, scaled(input_ids, logits))


@Mutant(CHECK, "state of a slot that a request leaves (I8)", "'logit_bias': .* of other requests")
class BiasOfTheRequestBefore(ReferenceRolloutBackend):
    """A request with a penalty alone gets the bias of the last biased request."""

    _bias: tuple[tuple[int, float], ...] = ()

    def _complete(self, entries: Entries) -> None:
        self._bias = entries[0][0].sampling.logit_bias or self._bias
        with patch.object(sampling, "Adjustment", self._biased):
            super()._complete(entries)

    def _biased(self, *, sampling: SamplingParams, start: int) -> Adjustment:
        penalized = (sampling.presence_penalty, sampling.repetition_penalty) != (0.0, 1.0)
        biased = replace(sampling, logit_bias=self._bias) if penalized else sampling
        return Adjustment(sampling=biased, start=start)


@Mutant(CHECK, "a frequency penalty under the name of the other (I8)", "count a token each time")
class PenalizesEachTime(Replaced):
    """The presence penalty is subtracted once for each time that the response has a token."""

    class adjustment(Adjustment):  # noqa: N801
        def __call__(self, input_ids: Tensor, logits: Tensor) -> Tensor:
            local = input_ids[:, self.start :]
            again = torch.zeros_like(logits).scatter_add(1, local, torch.ones_like(local).to(logits))
            logits = logits - (again - 1).clamp(min=0) * self.sampling.presence_penalty
            return super().__call__(input_ids, logits)


@Mutant(CHECK, "SGLang #20250: counts of a request's neighbours (I8)", "with .*_penalty = ")
class PenalizesTokensOfTheBatch(Replaced):
    """Penalties count the responses of all requests in a batch."""

    class adjustment(Adjustment):  # noqa: N801
        def __call__(self, input_ids: Tensor, logits: Tensor) -> Tensor:
            shared = input_ids[:, self.start :].reshape(1, -1).expand(len(input_ids), -1)
            return super().__call__(torch.cat([input_ids[:, : self.start], shared], 1), logits)


@Mutant(CHECK, "a prompt's last token in the counts (I8)", "the prompt's last token as well")
class PenalizesTheLastTokenOfThePrompt(Replaced):
    """Penalties count from the token that begins the response's first pass, the prompt's last."""

    class adjustment(Adjustment):  # noqa: N801
        def __call__(self, input_ids: Tensor, logits: Tensor) -> Tensor:
            counted = Adjustment(sampling=self.sampling, start=self.start - 1)
            return counted(input_ids, logits)


@Mutant(CHECK, "values clamped to what the server takes (I8)", "with .*repetition_penalty = 0.7")
class ClampsThePenalty(Replaced):
    """A repetition penalty below 1 counts as 1."""

    class adjustment(Adjustment):  # noqa: N801
        def __call__(self, input_ids: Tensor, logits: Tensor) -> Tensor:
            penalty = max(self.sampling.repetition_penalty, 1.0)
            clamped = replace(self.sampling, repetition_penalty=penalty)
            return Adjustment(sampling=clamped, start=self.start)(input_ids, logits)


# ----------------------------------------------------------- seeds and groups


class Seeded(ReferenceRolloutBackend):
    """The seeds of a batch are changed."""

    def _seeds(self, entries: Entries) -> list[int | None]:
        raise NotImplementedError

    def _complete(self, entries: Entries) -> None:
        pairs = zip(entries, self._seeds(entries), strict=True)
        super()._complete(
            [(replace(r, sampling=replace(r.sampling, seed=seed)), future) for (r, future), seed in pairs]
        )


@Mutant(CHECK, "one generator for a batch (I8)", "equal seeds got other tokens")
class IgnoresSeedsInABatch(Seeded):
    """A seed counts only where a request is alone."""

    def _seeds(self, entries: Entries) -> list[int | None]:
        return [request.sampling.seed if len(entries) == 1 else None for request, _ in entries]


@Mutant(CHECK, "a seed in JSON (I8)", "do requests share a seed or an answer")
class SeedsAreFloats(ReferenceRolloutBackend):
    """A seed becomes a float32 on its way."""

    def _seed(self, sampling: SamplingParams) -> int:
        return int(torch.tensor(super()._seed(sampling)).float()) % 2**62


@Mutant("I8.sampling", "a seed of 16 bits (I8)", "all of them are equal: do requests share a seed")
class SeedsHaveSixteenBits(ReferenceRolloutBackend):
    """Seeds count modulo 65,536."""

    def _seed(self, sampling: SamplingParams) -> int:
        return super()._seed(sampling) % 2**16


@Mutant(
    "I8.sampling", "a seed that does not reach the server (I8)", "the same tokens with config.seed = 1000"
)
class DrawsByTheNumberOfTheRequest(ReferenceRolloutBackend):
    """Requests without a seed take the next one from 0 on."""

    def _seed(self, sampling: SamplingParams) -> int:
        if sampling.seed is None:
            self._unseeded += 1
        return self._unseeded if sampling.seed is None else sampling.seed


@Mutant(CHECK, "a falsy value that counts as not set (I8)", "equal seeds got other tokens")
class SeedZeroIsNone(Seeded):
    """The seed 0 counts as none."""

    def _seeds(self, entries: Entries) -> list[int | None]:
        return [request.sampling.seed or None for request, _ in entries]


@Mutant(CHECK, "seed + i for the samples of a group (I8)", "equal seeds got other tokens")
class CountsFromTheSeed(Seeded):
    """The place in the batch is added to the seed."""

    def _seeds(self, entries: Entries) -> list[int | None]:
        seeds = [request.sampling.seed for request, _ in entries]
        return [None if seed is None else seed + place for place, seed in enumerate(seeds)]


@Mutant(
    CHECK,
    "requests of a batch that are merged by their prompt (I8)",
    "do requests share a seed|equal seeds got other tokens",
)
class AnswersEqualPromptsOnce(ReferenceRolloutBackend):
    """The second of two equal prompts in a batch gets the answer of the first."""

    def _complete(self, entries: Entries) -> None:
        firsts: dict[tuple[int, ...], Future[LLMResponse]] = {}
        for request, future in entries:
            firsts.setdefault(request.input_ids, future)
        super()._complete([entry for entry in entries if firsts[entry[0].input_ids] is entry[1]])
        for request, future in entries:
            if not future.done():
                future.set_result(replace(firsts[request.input_ids].result(), rid=request.rid))


# ----------------------------------------------------------- paths of their own


@Mutant(CHECK, "a fast path for greedy decoding (I8)", "with temperature = 0.*(penalty|logit_bias)")
class GreedyWithoutPenalties(ReferenceRolloutBackend):
    """Greedy decoding takes the most likely token before penalties and biases."""

    def _complete(self, entries: Entries) -> None:
        if entries[0][0].sampling.greedy:
            bare = {"presence_penalty": 0.0, "repetition_penalty": 1.0, "logit_bias": ()}
            entries = [(replace(r, sampling=_changed(r.sampling, bare)), f) for r, f in entries]
        super()._complete(entries)


@Mutant(CHECK, "a sampler of its own for requests with seeds (I8)", "with .*seed = one for")
class SeedsTurnCutsOff(ReferenceRolloutBackend):
    """A request with a seed is drawn without top-k."""

    def _complete(self, entries: Entries) -> None:
        seeded = [(r, f) for r, f in entries if r.sampling.seed is not None]
        if seeded:
            super()._complete(
                [(replace(r, sampling=_changed(r.sampling, {"top_k": None})), f) for r, f in seeded]
            )
        if plain := [(r, f) for r, f in entries if r.sampling.seed is None]:
            super()._complete(plain)


@Mutant(CHECK, "vllm #14301: one cut for a mixed batch", "with .*: .* came")
class SmallestTopPOfABatch(ReferenceRolloutBackend):
    """Requests that differ only in their top-p share a batch, and the smallest of them."""

    def _drain(self) -> None:
        entries = list(self._queue)
        keys = [replace(request.sampling, top_p=1.0, seed=None) for request, _ in entries]
        for number, (request, future) in enumerate(entries):
            alike = [r for (r, _), key in zip(entries, keys, strict=True) if key == keys[number]]
            sampling = replace(request.sampling, top_p=min(r.sampling.top_p for r in alike))
            self._queue[number] = (replace(request, sampling=sampling), future)
        super()._drain()


@Mutant(CHECK, "top_k = 1 that counts as greedy (SGLang)", "with temperature = .*top_k = 1")
class TopOneIsGreedy(ReferenceRolloutBackend):
    """With top-k of 1, log-probs are as in greedy decoding."""

    def _complete(self, entries: Entries) -> None:
        if entries[0][0].sampling.top_k == 1:
            entries = [(replace(r, sampling=replace(r.sampling, temperature=0.0)), f) for r, f in entries]
        super()._complete(entries)


@Mutant(
    "I19.stop", "end tokens of the first stop option (I19)", r"with stop = \('never',\) and stop_token_ids"
)
class StopTextsReplaceStopTokens(ReferenceRolloutBackend):
    """A request with ``stop`` does not end with ``stop_token_ids``."""

    def _complete(self, entries: Entries) -> None:
        if entries[0][0].sampling.stop:
            entries = [(replace(r, sampling=replace(r.sampling, stop_token_ids=())), f) for r, f in entries]
        super()._complete(entries)


@Mutant(CHECK, "the first token of a response has no log-prob of its own (I7)", "log-probs with .*one token")
class OneTokenWithoutTemperature(ReferenceRolloutBackend):
    """Answers of one token come from the prefill, with log-probs at temperature 1."""

    def _response(self, request: LLMRequest, completion: Completion) -> LLMResponse:
        if request.sampling.max_new_tokens == 1 and request.sampling.temperature > 0:
            completion = replace(
                completion,
                logprobs=tuple(value * request.sampling.temperature for value in completion.logprobs),
            )
        return super()._response(request, completion)


def _changed(params: SamplingParams, changes: dict[str, Any]) -> SamplingParams:
    return replace(params, **changes)


@Mutant(
    "I19.stop", "ignore_eos as a ban of EOS (I19)", "temperature = 1.0 and top_k = 1 and EOS drawn on the way"
)
class BansEosWhereItIsIgnored(Replaced):
    """With ``ignore_eos``, the end tokens are never drawn."""

    def _complete(self, entries: Entries) -> None:
        eos = list(self._eos_token_ids)

        class Banning(GumbelSampler):
            def __init__(self, sampling: SamplingParams, seeds: Sequence[int]) -> None:
                super().__init__(sampling, seeds)
                self._banned = eos if sampling.ignore_eos else []

            def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
                noisy = super().__call__(input_ids, scores)
                noisy[:, self._banned] = -torch.inf
                return noisy

        self.sampler = Banning
        super()._complete(entries)
