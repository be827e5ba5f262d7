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
from core_rl.reference.sampling import Adjustment, Completion
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


class DrawsAtTemperatureOne(Sampling):
    """The temperature never reaches the sampler."""

    def _drawn_with(self, sampling: SamplingParams) -> SamplingParams:
        return replace(sampling, temperature=1.0)


class AlwaysGreedy(Sampling):
    """The most likely token is taken, whatever is asked for."""

    def _drawn_with(self, sampling: SamplingParams) -> SamplingParams:
        return replace(sampling, temperature=0.0)


class NeverGreedy(Sampling):
    """Temperature 0 is taken for a value that is not set."""

    def _drawn_with(self, sampling: SamplingParams) -> SamplingParams:
        return replace(sampling, temperature=sampling.temperature or 1.0)


class TopKByDefault(Sampling):
    """Without a top-k in the request, the library's default of 50 cuts."""

    def _drawn_with(self, sampling: SamplingParams) -> SamplingParams:
        return replace(sampling, top_k=sampling.top_k or 50)


class TopPOfTheGenerationConfig(Sampling):
    """Without a top-p in the request, that of the model's generation config cuts."""

    def _drawn_with(self, sampling: SamplingParams) -> SamplingParams:
        return replace(sampling, top_p=0.8 if sampling.top_p == 1 else sampling.top_p)


class IgnoresTopK(Sampling):
    """``top_k`` is not passed on."""

    def _drawn_with(self, sampling: SamplingParams) -> SamplingParams:
        return replace(sampling, top_k=None)


class IgnoresMinP(Sampling):
    """``min_p`` is not passed on."""

    def _drawn_with(self, sampling: SamplingParams) -> SamplingParams:
        return replace(sampling, min_p=0.0)


class IgnoresLogitBias(Sampling):
    """``logit_bias`` is not passed on."""

    def _drawn_with(self, sampling: SamplingParams) -> SamplingParams:
        return replace(sampling, logit_bias=())


class IgnoresThePresencePenalty(Sampling):
    """``presence_penalty`` is not passed on."""

    def _drawn_with(self, sampling: SamplingParams) -> SamplingParams:
        return replace(sampling, presence_penalty=0.0)


class IgnoresStopTexts(Sampling):
    """``stop`` is not passed on."""

    def _drawn_with(self, sampling: SamplingParams) -> SamplingParams:
        return replace(sampling, stop=())


class PenalizesThePrompt(ReferenceRolloutBackend):
    """``repetition_penalty`` is that of transformers, which counts the tokens of the prompt too."""

    def _complete(self, entries: Entries) -> None:
        with patch.object(sampling, "Adjustment", partial(_from_the_first, sampling.Adjustment)):
            super()._complete(entries)


def _from_the_first(kind: type[Adjustment], *, sampling: SamplingParams, start: int) -> Adjustment:
    return kind(sampling=sampling, start=0)


class OneSeedForAGroup(ReferenceRolloutBackend):
    """A request without a seed takes the engine's, so that equal requests get equal answers."""

    def _seed(self, sampling: SamplingParams) -> int:
        return self.config.seed if sampling.seed is None else sampling.seed


class OneSeedForABatch(ReferenceRolloutBackend):
    """All requests of a batch draw from the stream of its first one."""

    def _complete(self, entries: Entries) -> None:
        self._first = self._seed(entries[0][0].sampling)
        shared = [(replace(r, sampling=replace(r.sampling, seed=self._first)), f) for r, f in entries]
        super()._complete(shared)


# ----------------------------------------------------------- where it ends


class DropsTheStopToken(ReferenceRolloutBackend):
    """The response lacks the token that ends it."""

    def _response(self, request: LLMRequest, completion: Completion) -> LLMResponse:
        if completion.stop_reason == "stop" and len(completion.ids) > 1:
            completion = replace(completion, ids=completion.ids[:-1], logprobs=completion.logprobs[:-1])
        return super()._response(request, completion)


class KnowsNoEos(ReferenceRolloutBackend):
    """The EOS of the model's config is never read."""

    def build(self, context: Context, addresses: tuple[str, ...], ft_spec: FinetuneSpec) -> ModelLimits:
        limits = super().build(context, addresses, ft_spec)
        self._eos_token_ids = ()
        return limits


class IgnoresStopTokens(Sampling):
    """``stop_token_ids`` are not passed on."""

    def _drawn_with(self, sampling: SamplingParams) -> SamplingParams:
        return replace(sampling, stop_token_ids=())


class CutsLongAnswers(ReferenceRolloutBackend):
    """A default of the server ends answers after 16 tokens, as if they were finished."""

    def _response(self, request: LLMRequest, completion: Completion) -> LLMResponse:
        if len(completion.ids) > 16:
            completion = Completion(
                ids=completion.ids[:16], logprobs=completion.logprobs[:16], stop_reason="stop"
            )
        return super()._response(request, completion)


class PadsTheVocabulary(ReferenceRolloutBackend):
    """The vocabulary is that of the padded embedding."""

    def build(self, context: Context, addresses: tuple[str, ...], ft_spec: FinetuneSpec) -> ModelLimits:
        limits = super().build(context, addresses, ft_spec)
        return replace(limits, vocab_size=-(-limits.vocab_size // 64) * 64)


DRAWN, STOP, LIMITS = "I8.sampling", "I19.stop", "contract.rollout-limits"
CUT, TEMPERED = "I8.rollout-cut", "I8.rollout-temperature"
MUTANTS = (
    Mutant(
        engine=NeverGreedy,
        killed_by=TEMPERED,
        issue="a falsy value that counts as not set (I8)",
        says=r"greedy decoding took token \d+ .* token \d+ has",
    ),
    Mutant(
        engine=IgnoresTopK,
        killed_by=CUT,
        issue="parameters that never arrive (I8)",
        says="other tokens are left",
    ),
    Mutant(
        engine=DrawsAtTemperatureOne,
        killed_by=DRAWN,
        issue="a temperature that is not passed on (I8)",
        says="at temperature (2.5|0.6).* draws; expected",
    ),
    Mutant(
        engine=AlwaysGreedy,
        killed_by=DRAWN,
        issue="a server that falls back to greedy decoding (I8)",
        says="came 256 times in 256 draws",
    ),
    Mutant(
        engine=TopKByDefault,
        killed_by=DRAWN,
        issue="transformers' default top_k = 50 (I8)",
        says="most likely tokens came",
    ),
    Mutant(
        engine=TopPOfTheGenerationConfig,
        killed_by=DRAWN,
        issue="defaults of generation_config.json (I8)",
        says="came .* times in 256 draws",
    ),
    Mutant(
        engine=OneSeedForABatch,
        killed_by=DRAWN,
        issue="one random stream for a group (I8)",
        says="do requests share a seed",
    ),
    Mutant(
        engine=IgnoresMinP,
        killed_by="I8.min-p",
        issue="a field under another name (I8)",
        says="with min_p = .* draws; expected",
    ),
    Mutant(
        engine=IgnoresLogitBias,
        killed_by="I8.logit-bias",
        issue="a field under another name (I8)",
        says="with logit_bias = .* draws; expected",
    ),
    Mutant(
        engine=IgnoresThePresencePenalty,
        killed_by="I8.presence-penalty",
        issue="a field under another name (I8)",
        says="with presence_penalty = 1.5: a token that the answer has already",
    ),
    Mutant(
        engine=PenalizesThePrompt,
        killed_by="I8.repetition-penalty",
        issue="transformers' repetition_penalty, which counts the prompt (I8)",
        says="with repetition_penalty = 1.6",
    ),
    Mutant(
        engine=IgnoresStopTexts,
        killed_by="I19.stop-strings",
        issue="parameters that never arrive (I19)",
        says=r"with stop = \['<",
    ),
    Mutant(
        engine=OneSeedForAGroup,
        killed_by="I8.groups",
        issue="one seed for all samples of a group (I8)",
        says="8 equal requests at one time got 1 different",
    ),
    Mutant(
        engine=DropsTheStopToken,
        killed_by=STOP,
        issue="an EOS that is never trained (I19)",
        says="with EOS on the way",
    ),
    Mutant(
        engine=KnowsNoEos, killed_by=STOP, issue="EOS of another file (I19)", says="EOS on the way, greedy"
    ),
    Mutant(
        engine=IgnoresStopTokens,
        killed_by=STOP,
        issue="parameters that never arrive (I19)",
        says="stop_token_ids",
    ),
    Mutant(
        engine=CutsLongAnswers,
        killed_by=LIMITS,
        issue="a server's default length (I14)",
        says="gave 16 tokens and stop_reason = 'stop'",
    ),
    Mutant(
        engine=PadsTheVocabulary, killed_by=LIMITS, issue="padded embeddings (I10)", says="limits.vocab_size"
    ),
)
