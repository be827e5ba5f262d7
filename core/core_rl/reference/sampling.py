"""Sampling with Hugging Face's ``generate``; the draws of a request do not depend on its batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from core_rl.data.requests import SamplingParams, StopReason

__all__ = ["Completion", "generate"]


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
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        noise = torch.empty(scores.shape, dtype=torch.float64)
        for row, generator in zip(noise, self._generators, strict=True):
            row.exponential_(generator=generator)
        # float64 and a floor, because the logarithm of an exact 0 would always win.
        noise.clamp_(min=torch.finfo(torch.float64).tiny).log_().neg_()
        warped: Tensor = self._warpers(input_ids, scores)
        return warped + noise.to(scores)


def generate(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    seeds: Sequence[int],
    eos_token_ids: Sequence[int],
) -> list[Completion]:
    """Continue all ``prompts`` at once with the same ``sampling``, each with its own seed."""
    rows = [torch.tensor(prompt) for prompt in prompts]
    # Positions follow from the mask.
    ids, mask = _left_padded(rows), _left_padded([torch.ones_like(row) for row in rows])
    stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids)}
    config = GenerationConfig(
        max_new_tokens=sampling.max_new_tokens,
        do_sample=False,
        eos_token_id=sorted(stops) or None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    processors = [] if sampling.greedy else [GumbelSampler(sampling, seeds)]
    generate_: Any = model.generate
    output = generate_(
        ids.to(model.device),
        attention_mask=mask.to(model.device),
        generation_config=config,
        logits_processor=LogitsProcessorList(processors),
    )
    drawn = output.sequences[:, ids.shape[1] :]
    logprobs = torch.stack(
        [
            torch.log_softmax(logits.float() / sampling.logprob_temperature, dim=-1)
            .gather(1, drawn[:, step, None])
            .squeeze(1)
            for step, logits in enumerate(output.logits)
        ],
        dim=1,
    )
    return [_cut(row, values, stops) for row, values in zip(drawn.tolist(), logprobs.tolist(), strict=True)]


def _left_padded(rows: Sequence[Tensor]) -> Tensor:
    return pad_sequence(list(rows), batch_first=True, padding_side="left")


def _cut(ids: Sequence[int], logprobs: Sequence[float], stops: set[int]) -> Completion:
    """The drawn tokens up to the first stop token, which is kept."""
    end = next((index + 1 for index, token in enumerate(ids) if token in stops), None)
    reason: StopReason = "length" if end is None else "stop"
    return Completion(ids=tuple(ids[:end]), logprobs=tuple(logprobs[:end]), stop_reason=reason)
