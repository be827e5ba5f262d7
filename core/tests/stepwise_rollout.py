"""The reference inference backend token by token, with a pause between tokens: responses continue under new weights."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

from core_rl.backend.inference_backend import InferenceContext, ModelLimits
from core_rl.backend.meta import FinetuneSpec
from core_rl.config.capability import Capability
from core_rl.data.requests import LLMRequest, LLMResponse
from core_rl.reference import ROLLOUT_SPEC, ReferenceRolloutConfig
from core_rl.reference.rollout import ReferenceRolloutBackend
from core_rl.rollout.workflow import generate_whole

SPEC = replace(
    ROLLOUT_SPEC,
    name="stepwise-rollout",
    factory="stepwise_rollout:StepwiseRollout",
    capabilities=ROLLOUT_SPEC.capabilities | {Capability.PAUSE},
)


class StepwiseRollout(ReferenceRolloutBackend):
    """Each token is a request of its own to the base class. After ``hold_at`` tokens, a response waits for ``go``."""

    def build(
        self,
        context: InferenceContext[ReferenceRolloutConfig],
        addresses: tuple[str, ...],
        ft_spec: FinetuneSpec,
    ) -> ModelLimits:
        self._paused = threading.Event()
        self.hold_at = -1
        self.held, self.go = threading.Event(), threading.Event()
        return super().build(context, addresses, ft_spec)

    async def agenerate(self, request: LLMRequest) -> LLMResponse:
        return await generate_whole(_Tokens(self), request)

    async def one_token(self, request: LLMRequest) -> LLMResponse:
        while self._paused.is_set():
            await asyncio.sleep(0.001)
        sampling = replace(request.sampling, max_new_tokens=1)
        response = await super().agenerate(replace(request, sampling=sampling))
        if response.stop_reason == "stop" or request.sampling.max_new_tokens == 1:
            return response
        return replace(response, stop_reason="abort")

    async def wait_for_go(self, drawn: int) -> None:
        if drawn == self.hold_at:
            self.held.set()
            while not self.go.is_set():
                await asyncio.sleep(0.001)

    def pause(self) -> None:
        self._paused.set()

    def resume(self) -> None:
        self._paused.clear()


class _Tokens:
    """Draws one token and aborts, so that `generate_whole` asks for the next one."""

    def __init__(self, backend: StepwiseRollout) -> None:
        self._backend = backend
        self._drawn = 0

    async def agenerate(self, request: LLMRequest) -> LLMResponse:
        await self._backend.wait_for_go(self._drawn)
        self._drawn += 1
        return await self._backend.one_token(request)
