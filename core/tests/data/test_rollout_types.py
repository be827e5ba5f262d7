"""Requests and responses: invalid values, and log-probs."""

from __future__ import annotations

import math
import pickle
import subprocess
import sys
from typing import Any

import pytest

from core_rl.data.requests import LLMRequest, LLMResponse, SamplingParams
from core_rl.errors import ConfigError, EngineContractError


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens = 0"),
        ({"temperature": -0.1}, "temperature = -0.1"),
        ({"temperature": math.inf}, "temperature = inf"),
        ({"temperature": math.nan}, "temperature = nan"),
        ({"top_p": 0.0}, "top_p = 0.0"),
        ({"top_p": 1.01}, "top_p = 1.01"),
        ({"top_k": 0}, "top_k = 0"),
        ({"stop_token_ids": (3, -1)}, "stop_token_ids"),
        ({"stop": ("a", "")}, "stop has an empty text"),
        ({"min_p": 1.0}, "min_p = 1.0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty = 0.0"),
        ({"presence_penalty": math.nan}, "presence_penalty = nan"),
        ({"logit_bias": ((3, math.inf),)}, "logit_bias"),
        ({"seed": -1}, "seed = -1"),
        ({"seed": 2**63}, "seed"),
    ],
)
def test_sampling_params_out_of_range_are_refused(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named.replace(".", r"\.")):
        SamplingParams(**fields)


def test_all_problems_are_listed_at_once() -> None:
    with pytest.raises(ConfigError, match="2 problems") as caught:
        SamplingParams(top_p=0.0, max_new_tokens=0)
    assert "top_p" in str(caught.value)
    assert "max_new_tokens" in str(caught.value)


@pytest.mark.parametrize(("temperature", "reported"), [(0.0, 1.0), (0.7, 0.7), (1.0, 1.0), (2.5, 2.5)])
def test_greedy_logprobs_are_untempered(temperature: float, reported: float) -> None:
    assert SamplingParams(temperature=temperature).logprob_temperature == reported


def test_requests_have_names_of_their_own_and_tuples() -> None:
    first, second = LLMRequest(input_ids=[1, 2]), LLMRequest(input_ids=[1, 2])  # type: ignore[arg-type]
    assert first.rid != second.rid
    assert first.input_ids == (1, 2)
    assert pickle.loads(pickle.dumps(first)) == first


RESPONSE: dict[str, Any] = {
    "rid": "r",
    "input_ids": (1,),
    "output_ids": (2, 3),
    "logprobs": (-0.5, -0.25),
    "versions": (0, 1),
    "stop_reason": "stop",
}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"logprobs": (-0.5,)}, "1 logprobs for 2 output tokens"),
        ({"versions": (0, 0, 0)}, "3 versions for 2 output tokens"),
        ({"stop_reason": "eos"}, "stop_reason = 'eos'"),
        ({"output_ids": (), "logprobs": (), "versions": ()}, "no output tokens"),
    ],
)
def test_response_with_differing_lengths_is_refused(change: dict[str, Any], named: str) -> None:
    LLMResponse(**RESPONSE)
    with pytest.raises(EngineContractError, match=named):
        LLMResponse(**RESPONSE | change)


def test_an_aborted_response_may_be_empty() -> None:
    empty: dict[str, Any] = {"output_ids": (), "logprobs": (), "versions": (), "stop_reason": "abort"}
    assert LLMResponse(**RESPONSE | empty).output_ids == ()


def test_the_types_import_no_torch() -> None:
    code = "import sys, core_rl.data.requests; print('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        == "False\n"
    )
