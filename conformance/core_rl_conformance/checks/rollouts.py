"""Inference engines: what they draw, and the log-probs that they report of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import torch

from core_rl.engines.inference import InferenceEngine
from core_rl.rollout.types import LLMRequest, LLMResponse, SamplingParams
from core_rl_conformance.catalogue import check
from core_rl_conformance.data import Ragged, Row
from core_rl_conformance.diagnose import compare_tokens
from core_rl_conformance.subject import Subject


def answers(engine: InferenceEngine, requests: Sequence[LLMRequest]) -> list[LLMResponse]:
    """All answers, asked for at one time."""

    async def gather() -> list[LLMResponse]:
        return list(await asyncio.gather(*map(engine.agenerate, requests)))

    return asyncio.run(gather())


@check("I7.rollout-logprobs", kind="inference")
def rollout_logprobs_match_the_oracle(subject: Subject) -> None:
    """The log-prob that comes with every generated token is the oracle's for that token.

    Why: a trainer divides by these numbers; where they are off, every importance ratio is.
    Look at: the alignment of log-probs and tokens, and log-probs of the prompt's last token.
    """
    model, data = subject.model(), subject.data()
    engine = subject.serve(model)
    sampling = SamplingParams(max_new_tokens=8, ignore_eos=True, seed=subject.case.seed)
    requests = [LLMRequest(input_ids=row.ids, sampling=sampling) for row in data.rows]
    found = answers(engine, requests)
    whole = Ragged(tuple(_row(response) for response in found))
    expected = subject.outputs(model, whole, "logprobs")
    got = [torch.tensor(response.logprobs) for response in found]
    starts = [len(response.input_ids) for response in found]
    wanted = [value[start:] for value, start in zip(expected.values, starts, strict=True)]
    subject.verify(compare_tokens("log-probs of generated tokens", got, wanted, expected.tolerance))


def _row(response: LLMResponse) -> Row:
    ids = response.input_ids + response.output_ids
    return Row(ids=ids, mask=(True,) * len(ids), advantages=(0.0,) * len(ids), target=0.0)
