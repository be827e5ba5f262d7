"""Requests and responses of vLLM, and options that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm_support import build, tiny_model

from core_rl.data.requests import LLMRequest, SamplingParams
from core_rl.errors import ConfigError, RolloutError
from core_rl.servers.api import Refused
from core_rl.servers.facts import label_of
from core_rl.servers.wire import StaleServer
from core_rl_vllm.wire import VllmWire

WIRE = VllmWire()
REQUEST = LLMRequest(rid="r", input_ids=(1, 2), sampling=SamplingParams(max_new_tokens=2))


def choice(**changes: Any) -> dict[str, Any]:
    content = [{"token_id": 7, "logprob": -0.5}, {"token_id": 8, "logprob": -1.5}]
    usual = {
        "token_ids": [7, 8],
        "finish_reason": "length",
        "logprobs": {"content": content},
        "weight_versions": [
            {"version": label_of(3), "start": 0, "end": 1},
            {"version": label_of(4), "start": 1, "end": 2},
        ],
    }
    return {"choices": [{**usual, **changes}]}


def test_tokens_have_their_logprobs_and_versions() -> None:
    response = WIRE.response(REQUEST, choice(), (2,), "vLLM server s")
    assert (response.output_ids, response.logprobs, response.versions) == ((7, 8), (-0.5, -1.5), (3, 4))
    assert response.stop_reason == "length"


def test_an_aborted_request_may_have_no_tokens() -> None:
    actual = choice(token_ids=[], finish_reason="abort", logprobs={"content": []}, weight_versions=[])
    assert WIRE.response(REQUEST, actual, (), "vLLM server s").stop_reason == "abort"


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"token_ids": [7, 9]}, RolloutError),
        ({"logprobs": {"content": [{"token_id": 7, "logprob": -9999.0}]}, "token_ids": [7]}, RolloutError),
        ({"weight_versions": [{"version": label_of(3), "start": 0, "end": 1}]}, RolloutError),
        ({"weight_versions": [{"version": "4", "start": 0, "end": 2}]}, StaleServer),
        ({"finish_reason": "error"}, RolloutError),
        ({"logprobs": None}, RolloutError),
    ],
)
def test_incomplete_response_is_refused(changes: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match="vLLM server s"):
        WIRE.response(REQUEST, choice(**changes), (), "vLLM server s")


def test_request_names_all_parameters() -> None:
    request = LLMRequest(rid="r", input_ids=(1, 2), sampling=SamplingParams(stop_token_ids=(9,), seed=4))
    sampling = WIRE.generation(request, {2, 3})["sampling_params"]
    assert (sampling["stop_token_ids"], sampling["ignore_eos"], sampling["seed"]) == ([2, 3, 9], True, 4)
    assert (sampling["top_k"], sampling["top_p"], sampling["repetition_penalty"]) == (0, 1.0, 1.0)


@pytest.mark.parametrize(("temperature", "sent"), [(0.0, 0.0), (1e-9, 2e-5), (0.004, 0.004), (7.0, 7.0)])
def test_only_greedy_requests_have_no_temperature(temperature: float, sent: float) -> None:
    request = LLMRequest(input_ids=(1,), sampling=SamplingParams(temperature=temperature))
    assert WIRE.generation(request, ())["sampling_params"]["temperature"] == sent


def test_scores_cover_given_and_best_tokens() -> None:
    positions = [None, {"5": {"logprob": -3.0}, "6": {"logprob": -0.1}, "4": {"logprob": -2.0}}]
    scores = WIRE.scores({"prompt_logprobs": positions}, (1, 5), 2, "vLLM server s")
    torch.testing.assert_close(scores.logprobs, torch.tensor([-3.0], dtype=torch.float64))
    assert scores.ids.tolist() == [[6, 4]]
    with pytest.raises(RolloutError, match="vLLM server s"):
        WIRE.scores({"prompt_logprobs": positions}, (1, 5, 6), 2, "vLLM server s")


def test_server_with_ended_engine_is_lost() -> None:
    assert WIRE.is_lost(Refused("status 500: EngineCore encountered an issue. See stack trace"))
    assert not WIRE.is_lost(Refused("status 400: the prompt is too long"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host": "0.0.0.0", "api_key": "${env:KEY}"}, "does not protect"),
        ({"extra_args": ("--max-num-seqs=3",)}, "options.max_running_requests"),
    ],
)
def test_unsafe_or_duplicate_options_are_refused(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build(tiny_model(tmp_path), **options)
