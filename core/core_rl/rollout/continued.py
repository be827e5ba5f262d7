"""Interruptible generation: aborted requests are continued (AReaL, arXiv:2505.24298)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Protocol

from core_rl.data.requests import LLMRequest, LLMResponse, StopReason
from core_rl.errors import RolloutError
from core_rl.seeds import derive_seed

__all__ = ["TokenGenerator", "generate_whole"]

MAX_ABORTS = 8
"""Aborts in a row without a new token, after which an engine counts as broken."""


class TokenGenerator(Protocol):
    """The part of an engine that a workflow uses."""

    async def agenerate(self, request: LLMRequest) -> LLMResponse:
        """Continue one prompt."""
        ...


async def generate_whole(engine: TokenGenerator, request: LLMRequest) -> LLMResponse:
    """Continue a prompt to its end: where the engine aborts, the tokens so far go in as a longer prompt.

    Servers abort when new weights arrive. The tokens before keep their log-probs and their version, and no
    token is drawn twice. Sampling that depends on the tokens so far (penalties, ``stop``) begins anew.

    Raises `RolloutError` when the engine aborts again and again without a new token.
    """
    parts: list[LLMResponse] = []
    idle = 0
    while True:
        part = await engine.agenerate(_remainder(request, parts))
        if part.stop_reason == "abort" and request.sampling.reads_the_response:
            # Continued, it would know no more what it has drawn.
            part = replace(part, output_ids=(), logprobs=(), versions=())
        parts.append(part)
        if part.stop_reason != "abort":
            return _joined(request, parts, part.stop_reason)
        if sum(len(p.output_ids) for p in parts) == request.sampling.max_new_tokens:
            return _joined(request, parts, "length")
        idle = 0 if part.output_ids else idle + 1
        if idle == MAX_ABORTS:
            raise RolloutError(f"request {request.rid} was aborted {idle} times in a row without a new token")


def _remainder(request: LLMRequest, parts: Sequence[LLMResponse]) -> LLMRequest:
    if not parts:
        return request
    drawn = tuple(chain.from_iterable(part.output_ids for part in parts))
    sampling = request.sampling
    seed = sampling.seed if sampling.seed is None or not drawn else derive_seed(sampling.seed, len(drawn))
    left = replace(sampling, max_new_tokens=sampling.max_new_tokens - len(drawn), seed=seed)
    return LLMRequest(input_ids=request.input_ids + drawn, sampling=left, rid=f"{request.rid}-{len(parts)}")


def _joined(request: LLMRequest, parts: Sequence[LLMResponse], stop_reason: StopReason) -> LLMResponse:
    return LLMResponse(
        rid=request.rid,
        input_ids=request.input_ids,
        output_ids=tuple(chain.from_iterable(part.output_ids for part in parts)),
        logprobs=tuple(chain.from_iterable(part.logprobs for part in parts)),
        versions=tuple(chain.from_iterable(part.versions for part in parts)),
        stop_reason=stop_reason,
        latency_s=sum(part.latency_s for part in parts),
    )
