"""Inference engines that can be interrupted and shared, and those that lose something then."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace

import torch

from core_rl.engines.inference import ModelLimits
from core_rl.engines.meta import FinetuneSpec
from core_rl.errors import RolloutError
from core_rl.rollout.types import LLMRequest, LLMResponse
from core_rl_conformance.reference.rollout import ReferenceRolloutEngine
from core_rl_conformance.reference.sampling import Answer
from mutants.zoo import C, Mutant

Entries = Sequence[tuple[LLMRequest, Future[LLMResponse]]]

SERVING = frozenset({C.PAUSE, C.LAUNCH_SERVER})


class Served(ReferenceRolloutEngine):
    """A correct engine with servers in this process: one request after another, and none is begun during a pause."""

    def _launch_server(self, count: int) -> tuple[str, ...]:
        return tuple(f"in-process:{number}" for number in range(count))

    def _build(self, addresses: tuple[str, ...], ft_spec: FinetuneSpec) -> ModelLimits:
        self._working, self._may_begin = threading.Lock(), threading.Event()
        self._may_begin.set()
        return super()._build((), ft_spec)

    def _teardown(self) -> None:
        if hasattr(self, "_worker"):
            super()._teardown()

    def _answer(self, entries: Entries) -> None:
        for entry in entries:
            self._may_begin.wait()
            with self._working:
                super()._answer([entry])

    def _pause(self) -> None:
        self._may_begin.clear()
        with self._working:
            """What was begun is done."""

    def _resume(self) -> None:
        self._may_begin.set()


class DrawsOn(Served):
    """What is in flight is not interrupted by a pause."""

    def _pause(self) -> None:
        """Nothing to do."""


class EndsAtThePause(Served):
    """What a pause interrupts ends with the tokens that it has."""

    _interrupted = False

    def _pause(self) -> None:
        super()._pause()
        self._interrupted = True

    def _response(self, request: LLMRequest, answer: Answer) -> LLMResponse:
        found = super()._response(request, answer)
        if not self._interrupted:
            return found
        half = len(found.output_ids) // 2
        cut = {name: getattr(found, name)[:half] for name in ("output_ids", "logprobs", "versions")}
        return replace(found, stop_reason="abort", **cut)


class TakesServersDown(Served):
    """The engine that leaves ends the servers that it was only connected to."""

    _down: set[str] = set()  # noqa: RUF012  # the servers of all engines

    def _build(self, addresses: tuple[str, ...], ft_spec: FinetuneSpec) -> ModelLimits:
        self._addresses = addresses
        self._down.clear()
        return super()._build(addresses, ft_spec)

    def _teardown(self) -> None:
        super()._teardown()
        self._down.update(getattr(self, "_addresses", ()))

    async def _agenerate(self, request: LLMRequest) -> LLMResponse:
        if self._down & set(self._addresses):
            raise RolloutError(f"server {self._addresses[0]} is gone")
        return await super()._agenerate(request)


class WakesWithNoise(ReferenceRolloutEngine):
    """One buffer of the weights is not restored after a sleep."""

    def _resume_memory(self) -> None:
        super()._resume_memory()
        with torch.no_grad():
            parameter = next(value for value in self._model.parameters() if value.dim() > 1)
            parameter.copy_(torch.randn(parameter.shape))


class NeverSleeps(ReferenceRolloutEngine):
    """Requests are served from memory that was given back."""

    def release_memory(self) -> None:
        """Nothing."""

    def resume_memory(self) -> None:
        """Nothing."""


MUTANTS = (
    Mutant(
        engine=DrawsOn,
        killed_by="I14.interrupted",
        issue="tokens of no version (I14)",
        says="were answered before resume",
        declared=SERVING,
    ),
    Mutant(
        engine=EndsAtThePause,
        killed_by="I14.interrupted",
        issue="verl #7207",
        says="do not have the 40 tokens",
        declared=SERVING,
    ),
    Mutant(
        engine=TakesServersDown,
        killed_by="contract.launched-servers",
        issue="an evaluation that ends the trainer's servers",
        says="is gone",
        declared=SERVING,
    ),
    Mutant(
        engine=WakesWithNoise,
        killed_by="I15.sleep",
        issue="vllm #44371: a buffer that a reload leaves as it is",
        says="greedy answers are other ones",
    ),
    Mutant(
        engine=NeverSleeps,
        killed_by="I15.sleep",
        issue="answers from memory that is somebody else's (I15)",
        says="was not refused",
    ),
)
