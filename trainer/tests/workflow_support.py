"""Support of the tests of workflows and rewards: an engine that repeats the prompt."""

from __future__ import annotations

import asyncio

from core_rl.data.requests import LLMRequest, LLMResponse, StopReason


class Echo:
    """Answers with the prompt's first tokens; remembers the requests, and what ran at once."""

    def __init__(self, stop_reason: StopReason = "stop") -> None:
        self.requests: list[LLMRequest] = []
        self.running = self.most_running = 0
        self._stop_reason = stop_reason

    async def agenerate(self, request: LLMRequest) -> LLMResponse:
        self.requests.append(request)
        stop_reason: StopReason = self._stop_reason if len(self.requests) == 1 else "stop"
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        await asyncio.sleep(0.001)
        self.running -= 1
        return LLMResponse(
            rid=request.rid,
            input_ids=request.input_ids,
            output_ids=request.input_ids[:2],
            logprobs=(-0.5, -1.5),
            versions=(3, 4),
            stop_reason=stop_reason,
        )
