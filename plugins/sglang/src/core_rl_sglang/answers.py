"""Requests as SGLang takes them, and its answers as the core takes them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from core_rl.data.requests import LLMRequest, LLMResponse, SamplingParams, StopReason
from core_rl.errors import RolloutError

__all__ = ["Piece", "StaleServer", "generation_body", "next_piece", "to_response"]


MOST_LIKELY_ONLY = 1e-9
"""A ``top_p`` that any token reaches by itself."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Tokens of an answer that goes on, and their log-probs."""

    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


class StaleServer(RolloutError):
    """The server answered with weights that this engine never gave it: somebody has started it anew."""


def generation_body(request: LLMRequest, rid: str) -> dict[str, Any]:
    """The body of ``POST /generate``. ``rid`` is new for each attempt: a server aborts by the beginning of a name."""
    return {
        "rid": rid,
        "input_ids": list(request.input_ids),
        "sampling_params": _sampling(request.sampling),
        "return_logprob": True,
    }


def _sampling(sampling: SamplingParams) -> dict[str, Any]:
    """All that could otherwise come from the model's generation config is said."""
    top_k, top_p = sampling.top_k, sampling.top_p
    if top_k == 1 and not sampling.greedy:
        # SGLang takes top_k = 1 for greedy decoding, and reports log-probs without the temperature then.
        top_k, top_p = None, MOST_LIKELY_ONLY
    found: dict[str, Any] = {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": top_p,
        "top_k": -1 if top_k is None else top_k,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "ignore_eos": sampling.ignore_eos,
        "stop_token_ids": list(sampling.stop_token_ids),
    }
    if sampling.seed is not None:
        # Without --enable-deterministic-inference the server takes no notice. It holds 31 bits.
        found["sampling_seed"] = sampling.seed % 2**31
    return found


def to_response(request: LLMRequest, answer: Any, eos: Collection[int], address: str) -> LLMResponse:
    """The answer of the server at ``address`` to ``request``; ``eos`` are the end-of-sequence tokens of the model.

    Raises `RolloutError` for an answer that is none, and `StaleServer` for one by foreign weights.
    """
    try:
        return _response(request, answer, eos, address)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise RolloutError(
            f"SGLang server {address} gave an answer to request {request.rid} that cannot be read "
            f"({type(error).__name__}: {error}): {str(answer)[:300]}"
        ) from error


def next_piece(event: Any, seen: int, address: str) -> Piece | None:
    """What an event of a streamed answer adds to ``seen`` tokens; None for the last event, which is the answer.

    Raises `RolloutError` for an event that is none.
    """
    try:
        meta = event["meta_info"]
        if meta["finish_reason"] is not None:
            return None
        pairs = meta.get("output_token_logprobs", [])[seen:]
        ids, logprobs = tuple(token for _, token, _ in pairs), tuple(float(value) for value, _, _ in pairs)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise RolloutError(
            f"SGLang server {address} streamed something that cannot be read ({error!r}): {str(event)[:300]}"
        ) from error
    return Piece(output_ids=ids, logprobs=logprobs)


def _response(request: LLMRequest, answer: Any, eos: Collection[int], address: str) -> LLMResponse:
    meta, ids = answer["meta_info"], tuple(answer["output_ids"])
    versions: tuple[int, ...] = ()
    finish = meta["finish_reason"]
    aborted = finish["type"] == "abort"
    if aborted and finish.get("status_code"):
        raise RolloutError(
            f"SGLang server {address} refused request {request.rid}: {finish.get('message', finish)}"
        )
    if aborted and "weight_versions" not in meta:
        ids, pairs = (), []  # it was aborted before it began
    else:
        pairs = meta["output_token_logprobs"]
        versions = _versions(meta["weight_versions"], len(ids), address)
    if [token for _, token, _ in pairs] != list(ids):
        raise ValueError("its log-probs are of other tokens than its output_ids")
    sampling = request.sampling
    stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos)}
    # A server that ignores EOS ignores stop_token_ids too, and calls an answer whose last token ends it too long.
    end = next((place + 1 for place, token in enumerate(ids) if token in stops), None)
    reason: StopReason = "abort" if aborted else "length"
    return LLMResponse(
        rid=request.rid,
        input_ids=request.input_ids,
        output_ids=ids[:end],
        logprobs=tuple(float(logprob) for logprob, _, _ in pairs[:end]),
        versions=versions[:end],
        stop_reason=reason if end is None else "stop",
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
