from __future__ import annotations

import asyncio
from typing import cast

import pytest

from core_rl.data.requests import LLMRequest, LLMResponse, SamplingParams
from core_rl.engine.inference import InferenceEngine
from core_rl.errors import RolloutError
from core_rl_conformance.procedures import serving


class Silent:
    """An engine that never answers."""

    async def agenerate(self, request: LLMRequest) -> LLMResponse:
        await asyncio.Event().wait()
        raise AssertionError


@pytest.mark.parametrize(("lengths", "shown"), [((1, 1), "0.0625"), ((1, 12), "0.75")])
def test_longer_answers_have_more_time(
    lengths: tuple[int, ...], shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "CALL_TIMEOUT_S", 0.0)
    monkeypatch.setattr(serving, "TOKEN_S", 0.0625)
    requests = [
        LLMRequest(input_ids=(1,), sampling=SamplingParams(max_new_tokens=length)) for length in lengths
    ]
    with pytest.raises(RolloutError, match=f"2 requests were not answered within {shown} s"):
        serving.ask(cast("InferenceEngine", Silent()), requests)
