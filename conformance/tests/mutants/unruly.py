"""Engines that do not answer as engines do: for tests of the plugin."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace

import torch

from core_rl.backend.steps import MicroBatchStep
from core_rl.backend.train_backend import PassMode
from core_rl.data.batch import SequenceBatch
from core_rl.data.outputs import ModelOutput
from core_rl.data.requests import LLMRequest, LLMResponse
from core_rl.errors import UnsupportedCapability
from core_rl.reference.rollout import ReferenceRolloutBackend
from core_rl.reference.train import ReferenceBackend
from mutants.bases import Replicated, TrainContext


class DiesInEvaluation(ReferenceBackend):
    """The process ends in the middle of a pass."""

    def run(self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep, mode: PassMode) -> None:
        if mode == "forward":
            os._exit(3)
        super().run(micro_batches, step, mode)


class CrashesInEvaluation(ReferenceBackend):
    """A kernel ends the process."""

    def run(self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep, mode: PassMode) -> None:
        if mode == "forward":
            os.abort()
        super().run(micro_batches, step, mode)


class RaisesInEvaluation(ReferenceBackend):
    """A library raises on the way."""

    def run(self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep, mode: PassMode) -> None:
        if mode == "forward":
            torch.nn.functional.linear(torch.zeros(2, 3), torch.zeros(4, 5))
        super().run(micro_batches, step, mode)


class ExitsInEvaluation(ReferenceBackend):
    """Exits by ``sys.exit`` with a success."""

    def run(self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep, mode: PassMode) -> None:
        if mode == "forward":
            sys.exit(0)
        super().run(micro_batches, step, mode)


class HangsInEvaluation(ReferenceBackend):
    """A pass that never ends."""

    def run(self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep, mode: PassMode) -> None:
        if mode == "forward":
            threading.Event().wait()
        super().run(micro_batches, step, mode)


class LeavesAChild(DiesInEvaluation):
    """Starts a process of its own and dies without ending it."""

    def build(self, context: TrainContext) -> None:
        child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        sys.stderr.write(f"{CHILD} {child.pid}\n")
        super().build(context)


CHILD = "a child, process"


class _Changed(ReferenceBackend):
    """Base whose outputs go through ``_change``."""

    def outputs(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        return self._change(super().outputs(micro_batch, step))

    def _change(self, output: ModelOutput) -> ModelOutput:
        raise NotImplementedError


class WrongShape(_Changed):
    """The log-probs lack the last token."""

    def _change(self, output: ModelOutput) -> ModelOutput:
        return replace(output, logprobs=output["logprobs"][:-1])


class WrongDtype(_Changed):
    """The log-probs are in float64."""

    def _change(self, output: ModelOutput) -> ModelOutput:
        return replace(output, logprobs=output["logprobs"].double())


class NotANumber(_Changed):
    """The log-probs are NaN."""

    def _change(self, output: ModelOutput) -> ModelOutput:
        return replace(output, logprobs=output["logprobs"] * torch.nan)


class RunsAsACoroutine(ReferenceBackend):
    """A hook that must be awaited, and is not."""

    async def run(  # type: ignore[override]
        self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep, mode: PassMode
    ) -> None:
        super().run(micro_batches, step, mode)


class RanksDisagree(Replicated):
    """The second rank computes with other weights."""

    def build(self, context: TrainContext) -> None:
        super().build(context)
        if self.context.world.rank == 1:
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.mul_(1.01)


class LosesEveryThird(ReferenceRolloutBackend):
    """Every third request is never answered."""

    async def agenerate(self, request: LLMRequest) -> LLMResponse:
        self.asked = getattr(self, "asked", 0) + 1
        if self.asked % 3 == 0:
            await asyncio.Event().wait()
        return await super().agenerate(request)


class LacksAKey(ReferenceRolloutBackend):
    """A body without the field that the engine reads."""

    async def agenerate(self, request: LLMRequest) -> LLMResponse:
        body: dict[str, str] = {}
        raise KeyError(body["prompt"])


class RefusesGemma(ReferenceBackend):
    """A family without a plan."""

    def build(self, context: TrainContext) -> None:
        if "gemma2" in str(context.config.model.path):
            raise UnsupportedCapability("no plan for gemma2")
        super().build(context)
