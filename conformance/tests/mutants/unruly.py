"""Engines that do not answer as engines do: for tests of the plugin."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from core_rl.backend.meta import FinetuneSpec
from core_rl.backend.steps import MicroBatchStep
from core_rl.data.batch import SequenceBatch
from core_rl.data.outputs import ModelOutput
from core_rl.distributed.process_group import RankAddress
from core_rl.reference.train import ReferenceEngine
from mutants.bases import Replicated


class DiesInEvaluation(ReferenceEngine):
    """The process ends in the middle of a pass."""

    def _run(self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep, forward_only: bool) -> None:
        if forward_only:
            os._exit(3)
        super()._run(micro_batches, step, forward_only)


class ExitsInEvaluation(ReferenceEngine):
    """Somebody calls ``sys.exit`` with a success."""

    def _run(self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep, forward_only: bool) -> None:
        if forward_only:
            sys.exit(0)
        super()._run(micro_batches, step, forward_only)


class HangsInEvaluation(ReferenceEngine):
    """A pass that never ends."""

    def _run(self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep, forward_only: bool) -> None:
        if forward_only:
            time.sleep(3600)
        super()._run(micro_batches, step, forward_only)


class LeavesAChild(DiesInEvaluation):
    """It starts a process of its own and dies without ending it."""

    def _build(self, addr: RankAddress, ft_spec: FinetuneSpec) -> None:
        subprocess.Popen([sys.executable, "-c", f"import time; time.sleep(3600)  # {CHILD}"])
        super()._build(addr, ft_spec)


CHILD = "the child of an engine"


class _Changed(ReferenceEngine):
    """Its outputs go through ``_change``."""

    def _forward(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        return self._change(super()._forward(micro_batch, step))

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


class RunsAsACoroutine(ReferenceEngine):
    """A hook that must be awaited; nobody does."""

    async def _run(  # type: ignore[override]
        self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep, forward_only: bool
    ) -> None:
        super()._run(micro_batches, step, forward_only)


class RanksDisagree(Replicated):
    """The second rank computes with other weights."""

    def _build(self, addr: RankAddress, ft_spec: FinetuneSpec) -> None:
        super()._build(addr, ft_spec)
        if self.world.rank == 1:
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.mul_(1.01)
