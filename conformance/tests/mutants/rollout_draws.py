"""Inference engines that draw or end answers in other ways than they were asked to."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from unittest.mock import patch

from core_rl.backend.inference_backend import ModelLimits
from core_rl.backend.meta import FinetuneSpec
from core_rl.data.requests import LLMRequest, LLMResponse, SamplingParams
from core_rl.reference import sampling
from core_rl.reference.rollout import ReferenceRolloutBackend
from core_rl.reference.sampling import Adjustment, Completion, StopAtText
from mutants.rollouts import Entries, Rescored
from mutants.zoo import Context, Mutant

# ----------------------------------------------------------- drawn tokens


class Sampling(Rescored):
    """Tokens are drawn with wrong parameters; log-probs are right."""

    def _drawn_with(self, sampling: SamplingParams) -> SamplingParams:
        raise NotImplementedError

    async def agenerate(self, request: LLMRequest) -> LLMResponse:
        self._asked = {**getattr(self, "_asked", {}), request.rid: request.sampling}
        return await super().agenerate(replace(request, sampling=self._drawn_with(request.sampling)))

    def _response(self, request: LLMRequest, completion: Completion) -> LLMResponse:
        return super()._response(replace(request, sampling=self._asked[request.rid]), completion)


class IgnoresSeeds(Sampling):
    """A correct engine, which has no seeds, as SGLang without its deterministic inference."""

    def _drawn_with(self, sampling: SamplingParams) -> SamplingParams:
        return replace(sampling, seed=None)


@Mutant(
    "I8.sampling", "a temperature that is not passed on (I8)", "at temperature (2.5|0.6).* draws; expected"
)
class DrawsAtTemperatureOne(Sampling):
    """The temperature never reaches the sampler."""

    def _drawn_with(self, sampling: SamplingParams) -> SamplingParams:
        return replace(sampling, temperature=1.0)


@Mutant("I8.sampling", "a server that falls back to greedy decoding (I8)", "came 256 times in 256 draws")
class AlwaysGreedy(Sampling):
    """The most likely token is taken, whatever is asked for."""

    def _drawn_with(self, sampling: SamplingParams) -> SamplingParams:
        return replace(sampling, temperature=0.0)


@Mutant(
    "I8.rollout-temperature",
    "a falsy value that counts as not set (I8)",
    r"greedy decoding took token \d+ .* token \d+ has",
)
class NeverGreedy(Sampling):
    """Temperature 0 is taken for a value that is not set."""

    def _drawn_with(self, sampling: SamplingParams) -> SamplingParams:
        return replace(sampling, temperature=sampling.temperature or 1.0)


@Mutant("I8.sampling", "transformers' default top_k = 50 (I8)", "most likely tokens came")
class TopKByDefault(Sampling):
    """Without a top-k in the request, the library's default of 50 cuts."""

    def _drawn_with(self, sampling: SamplingParams) -> SamplingParams:
        return replace(sampling, top_k=sampling.top_k or 50)


@Mutant("I8.sampling", "defaults of generation_config.json (I8)", "came .* times in 256 draws")
class TopPOfTheGenerationConfig(Sampling):
    """Without a top-p in the request, that of the model's generation config cuts."""

    def _drawn_with(self, sampling: SamplingParams) -> SamplingParams:
        return replace(sampling, top_p=0.8 if sampling.top_p == 1 else sampling.top_p)


@Mutant("I8.sampling-pairs", "parameters that never arrive (I8)", "top_k has no effect")
class IgnoresTopK(Sampling):
    """``top_k`` is not passed on."""

    def _drawn_with(self, sampling: SamplingParams) -> SamplingParams:
        return replace(sampling, top_k=None)


@Mutant("I8.sampling-pairs", "a field under another name (I8)", "min_p has no effect")
class IgnoresMinP(Sampling):
    """``min_p`` is not passed on."""

    def _drawn_with(self, sampling: SamplingParams) -> SamplingParams:
        return replace(sampling, min_p=0.0)


@Mutant("I8.sampling-pairs", "a field under another name (I8)", "with .*logit_bias = of three tokens")
class IgnoresLogitBias(Sampling):
    """``logit_bias`` is not passed on."""

    def _drawn_with(self, sampling: SamplingParams) -> SamplingParams:
        return replace(sampling, logit_bias=())


@Mutant("I8.sampling-pairs", "a field under another name (I8)", "with .*presence_penalty = ")
class IgnoresThePresencePenalty(Sampling):
    """``presence_penalty`` is not passed on."""

    def _drawn_with(self, sampling: SamplingParams) -> SamplingParams:
        return replace(sampling, presence_penalty=0.0)


@Mutant("I8.sampling-pairs", "parameters that never arrive (I19)", "with stop = a text")
class IgnoresStopTexts(Sampling):
    """``stop`` is not passed on."""

    def _drawn_with(self, sampling: SamplingParams) -> SamplingParams:
        return replace(sampling, stop=())


@Mutant("I19.stop", "texts that are compared token by token (I19)", "with stop = .* a prompt of 3 tokens")
class StopsAtWholeTokens(Sampling):
    """A stop text counts where one token has all of it."""

    def _drawn_with(self, sampling: SamplingParams) -> SamplingParams:
        return replace(sampling, stop=tuple(text for text in sampling.stop if "><" not in text))


@Mutant(
    "I8.sampling-pairs",
    "transformers' repetition_penalty, which counts the prompt (I8)",
    "with .*(repetition|presence)_penalty = ",
)
class PenalizesThePrompt(ReferenceRolloutBackend):
    """``repetition_penalty`` is that of transformers, which counts the tokens of the prompt too."""

    def _complete(self, entries: Entries) -> None:
        with patch.object(sampling, "Adjustment", partial(_from_the_first, sampling.Adjustment)):
            super()._complete(entries)


def _from_the_first(kind: type[Adjustment], *, sampling: SamplingParams, start: int) -> Adjustment:
    return kind(sampling=sampling, start=0)


@Mutant("I8.sampling-pairs", "one seed for all samples of a group (I8)", "do requests share a seed")
class OneSeedForAGroup(ReferenceRolloutBackend):
    """A request without a seed takes the engine's, so that equal requests get equal answers."""

    def _seed(self, sampling: SamplingParams) -> int:
        return self.config.seed if sampling.seed is None else sampling.seed


@Mutant("I8.sampling", "one random stream for a group (I8)", "do requests share a seed")
class OneSeedForABatch(ReferenceRolloutBackend):
    """All requests of a batch draw from the stream of its first one."""

    def _complete(self, entries: Entries) -> None:
        self._first = self._seed(entries[0][0].sampling)
        shared = [(replace(r, sampling=replace(r.sampling, seed=self._first)), f) for r, f in entries]
        super()._complete(shared)


# ----------------------------------------------------------- where it ends


@Mutant("I19.stop", "an EOS that is never trained (I19)", "with EOS on the way")
class DropsTheStopToken(ReferenceRolloutBackend):
    """The response lacks the token that ends it."""

    def _response(self, request: LLMRequest, completion: Completion) -> LLMResponse:
        if completion.stop_reason == "stop" and len(completion.ids) > 1:
            completion = replace(completion, ids=completion.ids[:-1], logprobs=completion.logprobs[:-1])
        return super()._response(request, completion)


@Mutant("I19.stop", "EOS of another file (I19)", "EOS on the way, greedy")
class KnowsNoEos(ReferenceRolloutBackend):
    """The EOS of the model's config is never read."""

    def build(self, context: Context, addresses: tuple[str, ...], ft_spec: FinetuneSpec) -> ModelLimits:
        limits = super().build(context, addresses, ft_spec)
        self._eos_token_ids = ()
        return limits


@Mutant("I19.stop", "parameters that never arrive (I19)", "stop_token_ids")
class IgnoresStopTokens(Sampling):
    """``stop_token_ids`` are not passed on."""

    def _drawn_with(self, sampling: SamplingParams) -> SamplingParams:
        return replace(sampling, stop_token_ids=())


@Mutant("I19.stop", "stop texts looked for in the prompt (I19)", "with stop = .* a prompt of 3 tokens")
class StopTextBeginsInThePrompt(ReferenceRolloutBackend):
    """A stop text counts that begins in the last token of the prompt."""

    def _before(self, ids: tuple[int, ...], shortest: int) -> tuple[int, ...]:
        return ids[-1:]

    def _complete(self, entries: Entries) -> None:
        shortest, search = min(len(request.input_ids) for request, _ in entries), StopAtText.found_in
        for request, future in entries:
            before = self._before(request.input_ids, shortest)
            with patch.object(StopAtText, "found_in", lambda at, ids, b=before: search(at, [*b, *ids])):
                super()._complete([(request, future)])


@Mutant("I19.stop", "one length of prompts for a batch (I19)", "with stop = .* a prompt of 5 tokens")
class StopTextsAfterTheShortestPrompt(StopTextBeginsInThePrompt):
    """All that follows the length of a batch's shortest prompt counts as response."""

    def _before(self, ids: tuple[int, ...], shortest: int) -> tuple[int, ...]:
        return ids[shortest:]


@Mutant(
    "contract.rollout-limits", "a server's default length (I14)", "gave 16 tokens and stop_reason = 'stop'"
)
class CutsLongAnswers(ReferenceRolloutBackend):
    """A default of the server ends answers after 16 tokens, as if they were finished."""

    def _response(self, request: LLMRequest, completion: Completion) -> LLMResponse:
        if len(completion.ids) > 16:
            completion = Completion(
                ids=completion.ids[:16], logprobs=completion.logprobs[:16], stop_reason="stop"
            )
        return super()._response(request, completion)


@Mutant("contract.rollout-limits", "padded embeddings (I10)", "limits.vocab_size")
class PadsTheVocabulary(ReferenceRolloutBackend):
    """The vocabulary is that of the padded embedding."""

    def build(self, context: Context, addresses: tuple[str, ...], ft_spec: FinetuneSpec) -> ModelLimits:
        limits = super().build(context, addresses, ft_spec)
        return replace(limits, vocab_size=-(-limits.vocab_size // 64) * 64)
