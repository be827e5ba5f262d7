"""Sampling with Hugging Face's ``generate``; the draws of a request do not depend on its batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from core_rl.data.media import Media, join_media
from core_rl.data.requests import SamplingParams, StopReason
from core_rl.toolkit.positions import frequencies_change
from core_rl.toolkit.sequence_layers import stateful_layers
from core_rl.toolkit.vision import has_tower, sequence_arguments

DRAWN = 256
"""Numbers that a row draws at one time, unless its vocabulary is larger."""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """The tokens that one request drew."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    stop_reason: StopReason


class GumbelSampler(LogitsProcessor):
    """Adds Gumbel noise to the logits: the largest sum is a draw from their softmax.

    The noise of each row comes from a generator of its own. So a draw does not depend on the batch, as it
    would with ``do_sample``. (Gumbel-max trick: Maddison et al., arXiv:1411.0030.)
    """

    def __init__(self, sampling: SamplingParams, seeds: Sequence[int]) -> None:
        # Any: transformers annotates its own calls too narrowly for mypy.
        self._warpers: Any = LogitsProcessorList([TemperatureLogitsWarper(float(sampling.temperature))])
        if sampling.top_k is not None:
            self._warpers.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            self._warpers.append(TopPLogitsWarper(sampling.top_p))
        if sampling.min_p > 0:
            self._warpers.append(MinPLogitsWarper(sampling.min_p))
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self._most = sampling.max_new_tokens
        self._noise: Iterator[Tensor] = iter(())

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if (noise := next(self._noise, None)) is None:
            self._noise = iter(self._drawn(scores.shape[1]))
            noise = next(self._noise)
        warped: Tensor = self._warpers(input_ids, scores)
        return warped + noise.to(scores)

    def _drawn(self, vocabulary: int) -> Tensor:
        """The noise of the next steps, float64 ``[steps, B, V]``: a call costs more than a few numbers."""
        steps = min(max(1, DRAWN // vocabulary), self._most)
        noise = torch.empty(len(self._generators), steps, vocabulary, dtype=torch.float64)
        for row, generator in zip(noise, self._generators, strict=True):
            row.exponential_(generator=generator)
        # float64 and a floor, because the logarithm of an exact 0 would always win.
        return noise.clamp_(min=torch.finfo(torch.float64).tiny).log_().neg_().transpose(0, 1)


@dataclass(frozen=True, kw_only=True)
class Adjustment:
    """The changes of logits by penalties and biases, from the tokens after the first ``start``."""

    sampling: SamplingParams
    start: int

    def __call__(self, input_ids: Tensor, logits: Tensor) -> Tensor:
        """``logits [B, V]`` after the tokens ``input_ids [B, L]``, changed as `core_rl.data.requests` defines it."""
        sampling = self.sampling
        if sampling.presence_penalty == 0 and sampling.repetition_penalty == 1 and not sampling.logit_bias:
            return logits
        has = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, input_ids[:, self.start :], value=True)
        logits = torch.where(has, logits - sampling.presence_penalty, logits)
        penalty = sampling.repetition_penalty
        logits = torch.where(has, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
        for token, bias in sampling.logit_bias:
            logits[:, token] += bias
        return logits


class StopAtText(StoppingCriteria):
    """Ends each row whose response contains a stop text."""

    def __init__(self, stop: Sequence[str], tokenizer: PreTrainedTokenizerBase, start: int) -> None:
        self._stop = stop
        self._tokenizer = tokenizer
        self._start = start

    def found_in(self, ids: Sequence[int]) -> bool:
        """Whether the text of the response ``ids`` contains a stop text."""
        text = str(self._tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))
        return any(stop in text for stop in self._stop)

    def __call__(self, input_ids: Tensor, scores: Any) -> Tensor:
        rows = input_ids[:, self._start :].tolist()
        return torch.tensor([self.found_in(row) for row in rows], device=input_ids.device)


def generate(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    seeds: Sequence[int],
    eos_token_ids: Sequence[int],
    tokenizer: PreTrainedTokenizerBase | None = None,
    media: Sequence[Media] = (),
) -> list[Completion]:
    """Continue all ``prompts`` at once with the same ``sampling``, each with its own seed.

    ``tokenizer`` is for ``sampling.stop``. ``media`` are the images of each prompt; their placeholders are never drawn.
    """
    ids, mask = _left_padded(prompts)
    stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids)}
    config = GenerationConfig(
        max_new_tokens=sampling.max_new_tokens,
        do_sample=False,
        eos_token_id=sorted(stops) or None,
        pad_token_id=0,
        # Keys of other rotary frequencies do not fit the later queries.
        use_cache=not frequencies_change(model, ids.shape[1], ids.shape[1] + sampling.max_new_tokens),
        output_logits=True,
        return_dict_in_generate=True,
    )
    adjust = Adjustment(sampling=sampling, start=ids.shape[1])
    processors: list[Any] = [adjust] if sampling.greedy else [adjust, GumbelSampler(sampling, seeds)]
    if has_tower(model.config):
        processors.insert(
            0, SuppressTokensLogitsProcessor([model.config.image_token_id], device=str(model.device))
        )
    at_text = StopAtText(sampling.stop, tokenizer, ids.shape[1]) if tokenizer is not None else None
    generate_: Any = model.generate
    ids, mask = ids.to(model.device), mask.to(model.device)
    shared = {} if any(media) or not config.use_cache else _shared_prefill(model, prompts, ids, mask)
    output = generate_(
        ids,
        attention_mask=mask,
        **shared,
        **sequence_arguments(model.base_model, ids, join_media(media)),
        generation_config=config,
        logits_processor=LogitsProcessorList(processors),
        stopping_criteria=StoppingCriteriaList([] if at_text is None else [at_text]),
    )
    drawn = output.sequences[:, ids.shape[1] :]
    logprobs = torch.stack(
        [
            torch.log_softmax(
                adjust(output.sequences[:, : ids.shape[1] + step], logits.float())
                / sampling.logprob_temperature,
                dim=-1,
            )
            .gather(1, drawn[:, step, None])
            .squeeze(1)
            for step, logits in enumerate(output.logits)
        ],
        dim=1,
    )
    rows_and_values = zip(drawn.tolist(), logprobs.tolist(), strict=True)
    return [_cut(row, values, stops, at_text) for row, values in rows_and_values]


@torch.no_grad()
def _shared_prefill(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], ids: Tensor, mask: Tensor
) -> dict[str, DynamicCache]:
    """Keys and values of all but the last token of ``prompts``, equal ones computed once; empty where none are equal.

    ``ids`` and ``mask`` are the prompts ``[B, L]``.
    """
    numbers = {tuple(prompt): number for number, prompt in enumerate(prompts)}
    if len(numbers) == len(prompts) or ids.shape[1] == 1 or stateful_layers(model.base_model):
        return {}
    rows = {number: row for row, number in enumerate(numbers.values())}
    distinct = torch.tensor(list(rows), device=ids.device)
    cache = DynamicCache(config=model.config)
    arguments: dict[str, Any] = {
        "attention_mask": mask[distinct, :-1],
        "past_key_values": cache,
        "use_cache": True,
    }
    if "position_ids" in signature(type(model.base_model).forward).parameters:
        arguments["position_ids"] = (arguments["attention_mask"].cumsum(1) - 1).clamp(min=0)
    model.base_model(input_ids=ids[distinct, :-1], **arguments)
    cache.batch_select_indices(torch.tensor([rows[numbers[tuple(prompt)]] for prompt in prompts]))
    return {"past_key_values": cache}


def _left_padded(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Ids and mask, int64 ``[B, L]``; positions follow from the mask."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    missing = torch.tensor([longest - len(prompt) for prompt in prompts])
    return ids, (torch.arange(longest) >= missing[:, None]).long()


def _cut(
    ids: Sequence[int], logprobs: Sequence[float], stops: set[int], at_text: StopAtText | None
) -> Completion:
    """Drawn tokens up to and including the first end token."""
    end = next(
        (
            count
            for count, token in enumerate(ids, start=1)
            if token in stops or (at_text is not None and at_text.found_in(ids[:count]))
        ),
        None,
    )
    reason: StopReason = "length" if end is None else "stop"
    return Completion(ids=tuple(ids[:end]), logprobs=tuple(logprobs[:end]), stop_reason=reason)
