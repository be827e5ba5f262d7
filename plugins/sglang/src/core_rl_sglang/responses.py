"""Requests in SGLang's format, and its responses in the core's."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from core_rl.data.requests import LLMRequest, LLMResponse, PartialResponse, SamplingParams, StopReason
from core_rl.errors import RolloutError

__all__ = ["StaleServer", "generation_body", "readable", "to_partial_response", "to_response"]

MOST_LIKELY_ONLY = 1e-9
"""A ``top_p`` that any token reaches by itself."""


class StaleServer(RolloutError):
    """The server responded with weights that this engine never gave it: it has been restarted."""


@contextmanager
def readable(response: Any, subject: str) -> Iterator[None]:
    """Raise `RolloutError` with ``response`` where the context cannot read it; ``subject`` says from where it came."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise RolloutError(f"{subject} that cannot be read ({error!r}): {str(response)[:300]}") from error


def generation_body(request: LLMRequest, rid: str) -> dict[str, Any]:
    """The body of ``POST /generate``. ``rid`` is new for each attempt: a server aborts by the beginning of a name."""
    return {
        "rid": rid,
        "input_ids": list(request.input_ids),
        "sampling_params": _sampling(request.sampling),
        "return_logprob": True,
    }


def _sampling(sampling: SamplingParams) -> dict[str, Any]:
    """All parameters that could otherwise come from the model's generation config."""
    top_k, top_p = sampling.top_k, sampling.top_p
    if top_k == 1 and not sampling.greedy:
        # SGLang takes top_k = 1 for greedy decoding, and reports log-probs without the temperature then.
        top_k, top_p = None, MOST_LIKELY_ONLY
    found: dict[str, Any] = {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": top_p,
        "top_k": -1 if top_k is None else top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "frequency_penalty": 0.0,
        "presence_penalty": sampling.presence_penalty,
        "ignore_eos": sampling.ignore_eos,
        "stop_token_ids": list(sampling.stop_token_ids),
    }
    if sampling.logit_bias:
        found["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
    if sampling.seed is not None:
        # Without --enable-deterministic-inference the server ignores it. It has 31 bits.
        found["sampling_seed"] = sampling.seed % 2**31
    return found


def to_response(request: LLMRequest, response: Any, eos: Collection[int], address: str) -> LLMResponse:
    """The response of the server at ``address`` to ``request``; ``eos`` are the model's end-of-sequence tokens.

    Raises `RolloutError` for a malformed response, and `StaleServer` for one by foreign weights.
    """
    with readable(response, f"SGLang server {address} sent a response to request {request.rid}"):
        meta, ids = response["meta_info"], tuple(response["output_ids"])
        finish = meta["finish_reason"]
        aborted = finish["type"] == "abort"
        if aborted and finish.get("status_code"):
            raise RolloutError(
                f"SGLang server {address} refused request {request.rid}: {finish.get('message', finish)}"
            )
        if aborted and "weight_versions" not in meta:  # before it began
            ids, meta = (), {"output_token_logprobs": [], "weight_versions": []}
        pairs = meta["output_token_logprobs"]
        versions = _versions(meta["weight_versions"], len(ids), address)
        if [token for _, token, _ in pairs] != list(ids):
            raise ValueError("its log-probs are of other tokens than its output_ids")
        sampling = request.sampling
        stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos)}
        # A server that ignores EOS ignores stop_token_ids too, and reports "length" where the last token ends it.
        end = next((index + 1 for index, token in enumerate(ids) if token in stops), None)
        reason: StopReason = "abort" if aborted else "length"
        return LLMResponse(
            rid=request.rid,
            input_ids=request.input_ids,
            output_ids=ids[:end],
            logprobs=tuple(float(logprob) for logprob, _, _ in pairs[:end]),
            versions=versions[:end],
            stop_reason=reason if end is None else "stop",
        )


def to_partial_response(event: Any, seen: int, address: str) -> PartialResponse | None:
    """The tokens of a streamed event after the first ``seen``; None for the last event, which is the whole response.

    Raises `RolloutError` for a malformed event.
    """
    with readable(event, f"SGLang server {address} streamed something"):
        meta = event["meta_info"]
        if meta["finish_reason"] is not None:
            return None
        pairs = meta.get("output_token_logprobs", [])[seen:]
        return PartialResponse(
            output_ids=tuple(token for _, token, _ in pairs), logprobs=tuple(float(p) for p, _, _ in pairs)
        )


def _versions(spans: list[dict[str, Any]], count: int, address: str) -> tuple[int, ...]:
    """The version of each output token, from the server's record of the updates on the way."""
    found: list[int] = []
    for span in spans:
        if not str(span["version"]).isdecimal():
            raise StaleServer(f"SGLang server {address} has weights of the version {span['version']!r}")
        if span["start"] != len(found):
            raise ValueError(f"its weight_versions leave out tokens: {spans}")
        found += [int(span["version"])] * (span["end"] - span["start"])
    if len(found) != count:
        raise ValueError(f"its weight_versions are of {len(found)} tokens, and there are {count}")
    return tuple(found)
