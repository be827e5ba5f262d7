"""Requests in SGLang's format, and the meaning of its responses."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core_rl.data.requests import LLMRequest, SamplingParams
from core_rl.errors import RolloutError
from core_rl.servers.facts import label_of
from core_rl.servers.pool import BLOCK, SLACK, PrefixRouter
from core_rl.servers.wire import StaleServer
from core_rl_sglang.backend import SglangWire

EOS = {2, 5}
WIRE = SglangWire()


def generated(ids: list[int], finish: dict[str, Any], versions: Any = None) -> dict[str, Any]:
    spans = [{"version": label_of(0), "start": 0, "end": len(ids)}] if versions is None else versions
    return {
        "output_ids": ids,
        "meta_info": {
            "finish_reason": finish,
            "output_token_logprobs": [[-1.0, token, None] for token in ids],
            "weight_versions": spans,
        },
    }


@pytest.mark.parametrize(
    ("sampling", "ids", "finish", "retained", "reason"),
    [
        ({}, [7, 8, 9], "length", [7, 8, 9], "length"),
        ({}, [7, 2], "stop", [7, 2], "stop"),
        ({}, [7, 8, 2], "length", [7, 8, 2], "stop"),
        ({"ignore_eos": True}, [7, 2, 5], "length", [7, 2, 5], "length"),
        ({"ignore_eos": True, "stop_token_ids": (8,)}, [7, 2, 8, 9, 8], "length", [7, 2, 8], "stop"),
        ({"stop_token_ids": (9,)}, [7, 9], "stop", [7, 9], "stop"),
        ({}, [7], "abort", [7], "abort"),
        ({}, [], "abort", [], "abort"),
    ],
)
def test_answers_end_as_the_contract_says(
    sampling: dict[str, Any], ids: list[int], finish: str, retained: list[int], reason: str
) -> None:
    request = LLMRequest(input_ids=(1,), sampling=SamplingParams(**sampling))
    actual = WIRE.response(request, generated(ids, {"type": finish}), EOS, "here:1")
    assert (list(actual.output_ids), actual.stop_reason) == (retained, reason)
    assert len(actual.logprobs) == len(actual.versions) == len(retained)


@pytest.mark.parametrize(
    ("sampling", "sent"), [({}, [2, 5]), ({"stop_token_ids": (9,)}, [2, 5, 9]), ({"ignore_eos": True}, [])]
)
def test_requests_stop_at_all_end_tokens(sampling: dict[str, Any], sent: list[int]) -> None:
    request = LLMRequest(input_ids=(1,), sampling=SamplingParams(**sampling))
    assert SglangWire().generation(request, EOS)["sampling_params"]["stop_token_ids"] == sent


def test_request_aborted_in_queue_has_no_tokens() -> None:
    actual = {"output_ids": [], "meta_info": {"finish_reason": {"type": "abort", "message": "Aborted"}}}
    assert WIRE.response(LLMRequest(input_ids=(1,)), actual, EOS, "here:1").stop_reason == "abort"


@given(lengths=st.lists(st.integers(0, 5), min_size=1, max_size=5))
def test_each_token_has_the_version_of_its_span(lengths: list[int]) -> None:
    spans, start = [], 0
    for version, length in enumerate(lengths):
        spans.append({"version": label_of(version), "start": start, "end": start + length})
        start += length
    finish = {"type": "length" if start else "abort"}
    request = LLMRequest(input_ids=(1,), sampling=SamplingParams(max_new_tokens=30, ignore_eos=True))
    actual = WIRE.response(request, generated([7] * start, finish, spans), EOS, "here:1")
    assert list(actual.versions) == [v for v, length in enumerate(lengths) for _ in range(length)]


@pytest.mark.parametrize(
    ("spans", "error"),
    [
        ([{"version": "1", "start": 0, "end": 2}], StaleServer),
        ([{"version": "core-rl:elsewhere:17:1", "start": 0, "end": 2}], StaleServer),
        ([{"version": label_of(1), "start": 0, "end": 1}], RolloutError),
        ([{"version": label_of(1), "start": 1, "end": 2}], RolloutError),
    ],
)
def test_foreign_or_missing_versions_are_refused(spans: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="here:1"):
        WIRE.response(LLMRequest(input_ids=(1,)), generated([7, 7], {"type": "length"}, spans), EOS, "here:1")


def test_request_sets_every_generation_option() -> None:
    body = WIRE.generation(LLMRequest(input_ids=(1, 2), rid="name"), ())
    sampling = body["sampling_params"]
    assert (body["input_ids"], body["return_logprob"]) == ([1, 2], True)
    assert (sampling["temperature"], sampling["top_p"], sampling["top_k"], sampling["min_p"]) == (
        1.0,
        1.0,
        -1,
        0,
    )
    assert (sampling["repetition_penalty"], sampling["frequency_penalty"]) == (1, 0)


def test_optional_sampling_has_the_names_of_the_server() -> None:
    options: dict[str, Any] = {"min_p": 0.1, "repetition_penalty": 1.2, "presence_penalty": 0.5}
    selected = SamplingParams(**options, logit_bias=((7, 2.0), (3, -1.0)))
    sampling = WIRE.generation(LLMRequest(input_ids=(1,), sampling=selected), ())["sampling_params"]
    assert {name: sampling[name] for name in options} == options
    assert sampling["logit_bias"] == {"3": -1.0, "7": 2.0}


@pytest.mark.parametrize(
    ("temperature", "top_k", "sent"), [(0.7, 1, -1), (0.7, 2, 2), (0.0, 1, 1), (1.0, None, -1)]
)
def test_single_candidate_token_keeps_temperature(temperature: float, top_k: int | None, sent: int) -> None:
    sampling = SamplingParams(temperature=temperature, top_k=top_k)
    actual = WIRE.generation(LLMRequest(input_ids=(1,), sampling=sampling), ())["sampling_params"]
    assert actual["top_k"] == sent
    assert (actual["top_p"] < 1e-6) == (top_k == 1 and temperature > 0)


def test_conversation_turns_keep_their_server() -> None:
    router, loads = PrefixRouter(), {"a": 0, "b": 0, "c": 0}
    first = list(range(3 * BLOCK))
    home = router.pick(first, loads)
    busy = {name: (SLACK if name == home else 0) for name in loads}
    assert router.pick([*first, 1, 2, 3], busy) == home
    assert router.pick([*first, 1, 2, 3], {**busy, home: SLACK + 1}) != home, "much more to do than others"
    assert router.pick([9] * 3 * BLOCK, busy) != home


def test_a_lost_server_is_forgotten() -> None:
    router = PrefixRouter()
    home = router.pick([1] * 40, {"a": 0, "b": 0})
    router.forget(home)
    second = "b" if home == "a" else "a"
    assert router.pick([1] * 40, {home: 1, second: 0}) == second
    assert router.pick([1] * 40, {home: 0}) == home, "the only one that is there"
