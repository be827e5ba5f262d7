from __future__ import annotations

import asyncio
from typing import cast

import pytest

from core_rl.data.requests import LLMRequest, LLMResponse, SamplingParams
from core_rl.engine.inference import InferenceEngine
from core_rl_conformance.outcomes import LostRequests
from core_rl_conformance.procedures import serving


class Silent:
    """An engine that answers every second request."""

    def __init__(self) -> None:
        self.asked = 0

    async def agenerate(self, request: LLMRequest) -> LLMResponse:
        self.asked += 1
        if self.asked % 2:
            await asyncio.Event().wait()
        return serving.as_response(request.input_ids)


@pytest.mark.parametrize(
    ("lengths", "shown"),
    [
        ((1, 1), "1 of 2 requests were answered within 0.0625 s; unanswered, by the order of sending: 1"),
        (
            (1, 12, 1),
            "1 of 3 requests were answered within 0.75 s; unanswered, by the order of sending: 1, 3",
        ),
        ((1,) * 40, "20 of 40 .*: 1, 3, 5, 7, 9, 11, 13, 15, ..."),
    ],
)
def test_lost_requests_are_counted(
    lengths: tuple[int, ...], shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "CALL_TIMEOUT_S", 0.0)
    monkeypatch.setattr(serving, "TOKEN_S", 0.0625)
    requests = [
        LLMRequest(input_ids=(1,), sampling=SamplingParams(max_new_tokens=length)) for length in lengths
    ]
    with pytest.raises(LostRequests, match=shown):
        serving.ask(cast("InferenceEngine", Silent()), requests)
