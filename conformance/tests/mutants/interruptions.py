"""Inference engines that can be interrupted and shared, some with losses."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace

import torch
from torch import Tensor

from core_rl.backend.inference_backend import ModelLimits
from core_rl.backend.meta import FinetuneSpec, WeightUpdateMeta
from core_rl.data.requests import LLMRequest, LLMResponse
from core_rl.engine.inference_guards import InferenceComponents, RequestGate
from core_rl.errors import RolloutError
from core_rl.reference.rollout import ReferenceRolloutBackend
from core_rl.reference.sampling import Completion
from mutants.zoo import C, Context, Mutant

Entries = Sequence[tuple[LLMRequest, Future[LLMResponse]]]

SERVING = frozenset({C.PAUSE, C.LAUNCH_SERVER})


class Served(ReferenceRolloutBackend):
    """A correct engine with servers in this process: one request after another, and none is begun during a pause."""

    def launch_server(self, context: Context, count: int) -> tuple[str, ...]:
        return tuple(f"in-process:{number}" for number in range(count))

    def build(self, context: Context, addresses: tuple[str, ...], ft_spec: FinetuneSpec) -> ModelLimits:
        self._working, self._paused = threading.Lock(), False
        self._waiting: list[tuple[LLMRequest, Future[LLMResponse]]] = []
        return super().build(context, (), ft_spec)

    def _complete(self, entries: Entries) -> None:
        """Complete one request after another; the worker stays free for updates while they wait."""
        for entry in entries:
            with self._working:
                if self._paused:
                    self._waiting.append(entry)
                else:
                    super()._complete([entry])

    def pause(self) -> None:
        with self._working:  # until what was begun is done
            self._paused = True

    def resume(self) -> None:
        with self._working:
            self._paused = False
            waiting, self._waiting = self._waiting, []
        assert self._worker is not None
        self._worker.submit(self._complete, waiting)


@Mutant("I14.interrupted", "tokens of no version (I14)", "were answered before resume", declared=SERVING)
class DrawsOn(Served):
    """A pause does not interrupt requests in flight."""

    def pause(self) -> None:
        """Nothing to do."""


@Mutant("I14.interrupted", "verl #7207", "do not have the 40 tokens", declared=SERVING)
class EndsAtThePause(Served):
    """A request that a pause interrupts ends with the tokens that it has."""

    _interrupted = False

    def pause(self) -> None:
        super().pause()
        self._interrupted = True

    def _response(self, request: LLMRequest, completion: Completion) -> LLMResponse:
        result = super()._response(request, completion)
        if not self._interrupted:
            return result
        half = len(result.output_ids) // 2
        cut = {name: getattr(result, name)[:half] for name in ("output_ids", "logprobs", "versions")}
        return replace(result, stop_reason="abort", **cut)


@Mutant(
    "contract.launched-servers", "an evaluation that ends the trainer's servers", "is gone", declared=SERVING
)
class TakesServersDown(Served):
    """The engine that leaves ends the servers that it was only connected to."""

    _down: set[str] = set()  # noqa: RUF012  # the servers of all engines

    def build(self, context: Context, addresses: tuple[str, ...], ft_spec: FinetuneSpec) -> ModelLimits:
        self._addresses = addresses
        self._down.clear()
        return super().build(context, addresses, ft_spec)

    def teardown(self) -> None:
        super().teardown()
        self._down.update(getattr(self, "_addresses", ()))

    async def agenerate(self, request: LLMRequest) -> LLMResponse:
        if self._down & set(self._addresses):
            raise RolloutError(f"server {self._addresses[0]} is gone")
        return await super().agenerate(request)


@Mutant(
    "I15.sleep",
    "vllm #44371: a buffer that a reload leaves as it is",
    "log-probs of greedy tokens after the first sleep",
)
class WakesWithNoise(ReferenceRolloutBackend):
    """One buffer of the weights is not restored after a sleep."""

    def resume_memory(self) -> None:
        super().resume_memory()
        with torch.no_grad():
            parameter = next(value for value in self._model.parameters() if value.dim() > 1)
            parameter.copy_(torch.randn(parameter.shape))


@Mutant(
    "I15.sleep",
    "vllm #44371: what an earlier sleep kept",
    r"after the second sleep[\s\S]*weights before the update",
)
class FirstSleepComesBack(ReferenceRolloutBackend):
    """The copy of the weights that the first sleep made comes back at each waking, over an update."""

    _first: dict[str, Tensor] | None = None

    def release_memory(self) -> None:
        if self._first is None:
            self._first = {name: value.detach().clone() for name, value in self._model.named_parameters()}
        super().release_memory()

    @torch.no_grad()
    def resume_memory(self) -> None:
        super().resume_memory()
        for name, value in (self._first or {}).items():
            self._model.get_parameter(name).copy_(value)


@Mutant(
    "I15.sleep", "a reload of the first weights", r"after the second sleep[\s\S]*weights before the update"
)
class WakesFromItsDirectory(ReferenceRolloutBackend):
    """Waking reads the directory again that the server was started with."""

    def resume_memory(self) -> None:
        super().resume_memory()
        self._adopt(self._load(self.config.model))


@Mutant("I15.sleep", "AReaL #941", r"versions \[0\]; the weights had 1")
class WakesAtVersionZero(ReferenceRolloutBackend):
    """The version is lost with the memory."""

    def resume_memory(self) -> None:
        super().resume_memory()
        self._served_version = 0


@Mutant("I14.update-in-flight", "AReaL #1569", "log-probs by the weights whose version tokens carry")
class LabelsAsItIsAsked(ReferenceRolloutBackend):
    """The version is read as a request goes out, while an update is on its way that serves it."""

    def build(self, context: Context, addresses: tuple[str, ...], ft_spec: FinetuneSpec) -> ModelLimits:
        self._asked = threading.Semaphore(0)
        return super().build(context, addresses, ft_spec)

    async def agenerate(self, request: LLMRequest) -> LLMResponse:
        version = self._served_version
        self._asked.release()
        result = await super().agenerate(request)
        self._asked.acquire(blocking=False)
        return replace(result, versions=(version,) * len(result.versions))

    def _install_from_disk(self, meta: WeightUpdateMeta) -> None:
        with self._asked:  # larger weights take so long that somebody asks meanwhile
            super()._install_from_disk(meta)


class ForgetsTheRelease(RequestGate):
    """The memory counts as there while it is released."""

    def release_memory(self) -> None:
        """Nothing."""


@Mutant("I15.sleep", "answers from memory that is somebody else's (I15)", "was not refused")
class NeverSleeps(ReferenceRolloutBackend):
    """Requests are served from memory that was given back."""

    components = InferenceComponents(gate=ForgetsTheRelease)
