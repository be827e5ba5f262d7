"""Inference engines that are right at the first token, for most temperatures, or the first time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel, TopPLogitsWarper

from core_rl.backend.inference_backend import ModelLimits, TopLogprobs
from core_rl.backend.meta import FinetuneSpec, WeightUpdateMeta
from core_rl.config.engine import ModelConfig
from core_rl.data.batch import SequenceBatch
from core_rl.data.requests import LLMRequest, LLMResponse, SamplingParams
from core_rl.reference.rollout import ReferenceRolloutBackend
from core_rl.reference.sampling import Completion, StopAtText
from mutants.rollout_draws import Sampling
from mutants.rollouts import Entries
from mutants.zoo import Context, Mutant

# ----------------------------------------------------------- drawn tokens


@Mutant(
    "I8.sampling",
    "a low temperature that counts as greedy (I8)",
    "at temperature 0.3, without seeds: .* came 256 times",
)
class LowTemperatureIsGreedy(Sampling):
    """Below a half, a temperature is taken for 0."""

    def _drawn_with(self, sampling: SamplingParams) -> SamplingParams:
        return replace(sampling, temperature=0.0) if sampling.temperature < 0.5 else sampling


@Mutant("I8.sampling-pairs", "a cut that keeps too few (I8)", "with .*top_p = 0.7")
class TopPIsNarrow(Sampling):
    """The tokens kept by top-p lack the token that reaches it."""

    def _drawn_with(self, sampling: SamplingParams) -> SamplingParams:
        return replace(sampling, top_p=sampling.top_p if sampling.top_p == 1 else 0.6 * sampling.top_p)


class InHalf(ReferenceRolloutBackend):
    """A correct engine: in bfloat16, its weights and what it computes from them are, up to the logits."""

    def _adopt(self, model: PreTrainedModel) -> None:
        super()._adopt(model)
        if self.config.dtype == "bfloat16":
            for parameter in model.parameters():
                parameter.data = parameter.data.bfloat16()
            model.get_output_embeddings().register_forward_hook(lambda _, inputs, logits: logits.float())


@Mutant(
    "I8.sampling-pairs",
    "a cut that keeps too few, where rounding moves tokens across it (I8)",
    "with .*top_p = ",
    dtype="bfloat16",
)
class TopPIsNarrowInHalf(InHalf, TopPIsNarrow):
    """In bfloat16, the tokens kept by top-p lack the token that reaches it."""


class Bent(ReferenceRolloutBackend):
    """The logits are changed before a token is drawn, and not for the reported log-prob."""

    def _bend(self, ids: Tensor, logits: Tensor) -> Tensor:
        raise NotImplementedError

    def _complete(self, entries: Entries) -> None:
        self._prompt_lengths = max(len(request.input_ids) for request, _ in entries)
        self._sampling = entries[0][0].sampling
        plain: Any = self._model.generate

        def generate(ids: Tensor, *, logits_processor: LogitsProcessorList, **rest: object) -> object:
            logits_processor.insert(0, self._bend)
            return plain(ids, logits_processor=logits_processor, **rest)

        object.__setattr__(self._model, "generate", generate)
        try:
            super()._complete(entries)
        finally:
            object.__delattr__(self._model, "generate")


@Mutant(
    "I8.sampling",
    "penalties of generation_config.json (I8)",
    "in answers of 24 tokens: a token that the answer has already",
)
class PenalizesRepetitionInAnswers(Bent):
    """The server's default makes tokens that the answer has already less likely."""

    def _bend(self, ids: Tensor, logits: Tensor) -> Tensor:
        local = ids[:, self._prompt_lengths :]
        return logits.scatter_add(1, local, torch.full(local.shape, -0.5)) if local.numel() else logits


@Mutant("I8.sampling-pairs", "the order of temperature and top-p (I8)", "with .*top_p = 0.7")
class TopPBeforeTemperature(Bent):
    """Top-p counts the probabilities before the temperature."""

    def _bend(self, ids: Tensor, logits: Tensor) -> Tensor:
        return TopPLogitsWarper(self._sampling.top_p)(ids, logits) if self._sampling.top_p < 1 else logits


# ----------------------------------------------------------- how it ends


@Mutant(
    "I19.stop",
    "finished answers that count as cut off (I14)",
    "and stop_reason = 'length'; expected .* and 'stop'",
)
class LengthBeforeStop(ReferenceRolloutBackend):
    """An answer with as many tokens as were allowed counts as cut off, whatever its last one is."""

    def _response(self, request: LLMRequest, completion: Completion) -> LLMResponse:
        if len(completion.ids) == request.sampling.max_new_tokens:
            completion = replace(completion, stop_reason="length")
        return super()._response(request, completion)


# ----------------------------------------------------------- the second time


@Mutant("I12.receive-disk", "caches by path (verl #7014)", "after the update to version 5")
class RemembersDirectories(ReferenceRolloutBackend):
    """Weights from a directory stay at the first update."""

    def _load(self, model: ModelConfig) -> PreTrainedModel:
        self._known: dict[str | None, PreTrainedModel] = getattr(self, "_known", {})
        path = self._path if self._path is not None else model.path
        if path not in self._known:
            self._known[path] = super()._load(model)
        return self._known[path]

    _path: str | None = None

    def _install_from_disk(self, meta: WeightUpdateMeta) -> None:
        self._path = meta.path
        super()._install_from_disk(meta)


# ----------------------------------------------------------- long sequences


@Mutant("I7.score", "a limit of the server's context (I14)", "sequence 0, token 50 of 64")
class ScoresFiftyTokens(ReferenceRolloutBackend):
    """Scores end at a limit of the server."""

    def score(self, batch: SequenceBatch, temperature: float) -> Tensor:
        rows = super().score(batch, temperature).split(batch.lengths)
        return torch.cat([row * (torch.arange(len(row)) < 50) for row in rows])


@Mutant("I7.top-logprobs", "a limit of the server's context (I14)", "top 1 log-probs")
class TopOfFiftyTokens(ReferenceRolloutBackend):
    """The most likely tokens come for as many places as the server allows."""

    def top_logprobs(self, batch: SequenceBatch, k: int, temperature: float) -> TopLogprobs:
        top = super().top_logprobs(batch, k, temperature)
        rows = top.logprobs.split(batch.lengths)
        cut = [row * (torch.arange(len(row)) < 50)[:, None] for row in rows]
        return replace(top, logprobs=torch.cat(cut))


@Mutant(
    "I19.stop",
    "one of several stop tokens (I19)",
    r"with stop_token_ids = \(\d+, \d+\) and ignore_eos, decoding gave .* and stop_reason = 'length'",
)
class FirstStopToken(Sampling):
    """Only the first of several ``stop_token_ids`` ends an answer."""

    def _drawn_with(self, sampling: SamplingParams) -> SamplingParams:
        return replace(sampling, stop_token_ids=sampling.stop_token_ids[:1])


@Mutant(
    "I19.stop",
    "ignore_eos that goes for the request's own tokens (I19)",
    r"with stop_token_ids = \(\d+, \d+\) and ignore_eos, decoding gave",
)
class IgnoresEosAmongStopTokens(ReferenceRolloutBackend):
    """With ``ignore_eos``, an EOS among ``stop_token_ids`` ends no answer."""

    def _complete(self, entries: Entries) -> None:
        super()._complete([(_without(request, set(self._eos_token_ids)), done) for request, done in entries])


@Mutant("I19.stop", "a config that is read again (I19)", "after an update, with EOS on the way")
class OneEosAfterAnUpdate(ReferenceRolloutBackend):
    """After an update, the first of several end tokens alone ends an answer."""

    def update_weights(self, meta: WeightUpdateMeta) -> None:
        super().update_weights(meta)
        self._eos_token_ids = self._eos_token_ids[:1]


@Mutant("I19.stop", "SGLang's tail of a response (I19)", "and a text of many tokens, decoding gave")
class StopTextsInATail(ReferenceRolloutBackend):
    """A stop text is searched in the last four tokens."""

    def _complete(self, entries: Entries) -> None:
        search = StopAtText.found_in
        with patch.object(StopAtText, "found_in", lambda text, ids: search(text, list(ids)[-4:])):
            super()._complete(entries)


@Mutant("I8.sampling-pairs", "token 0, which is falsy (I19)", "with .*end = stop_token_ids")
class StopTokenZeroIsNone(ReferenceRolloutBackend):
    """Token 0 among ``stop_token_ids`` ends no answer."""

    def _complete(self, entries: Entries) -> None:
        super()._complete([(_without(request, {0}), done) for request, done in entries])


def _without(request: LLMRequest, tokens: set[int]) -> LLMRequest:
    """``request``, which ends with none of ``tokens`` but by its EOS."""
    sampling = request.sampling
    if not (sampling.ignore_eos or tokens == {0}):
        return request
    left = tuple(token for token in sampling.stop_token_ids if token not in tokens)
    return replace(request, sampling=replace(sampling, stop_token_ids=left))


@Mutant(
    "I19.stop",
    "stop tokens in place of EOS (I19)",
    r"with stop_token_ids = \(\d+,\) and EOS before it, decoding gave",
)
class StopTokensReplaceEos(Sampling):
    """A request with ``stop_token_ids`` does not end with EOS."""

    def _drawn_with(self, sampling: SamplingParams) -> SamplingParams:
        return replace(sampling, ignore_eos=sampling.ignore_eos or bool(sampling.stop_token_ids))


@Mutant(
    "I19.stop",
    "configs with a list of EOS ids (I19)",
    r"with EOS on the way, decoding gave .*EOS is \d+ or \d+",
)
class OneEos(ReferenceRolloutBackend):
    """Only the first of the config's EOS ids counts."""

    def build(self, context: Context, addresses: tuple[str, ...], ft_spec: FinetuneSpec) -> ModelLimits:
        limits = super().build(context, addresses, ft_spec)
        self._eos_token_ids = self._eos_token_ids[:1]
        return limits
