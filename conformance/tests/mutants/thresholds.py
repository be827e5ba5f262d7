"""Faults that begin behind a number of calls, tokens or updates, for the soak to find."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from core_rl.backend.steps import MicroBatchStep
from core_rl.backend.train_backend import PassMode
from core_rl.data.batch import SequenceBatch
from core_rl.data.outputs import ModelOutput
from core_rl.toolkit.hf_backend import HFBackend
from mutants.bases import Packed
from mutants.zoo import Mutant


@Mutant("I5.two-calls", "two gradient buffers that take turns", "gradients of 3 calls")
class ThirdCallDropsTwo(Packed):
    """The third pass before a step drops the gradients of the first two."""

    passes = 0

    def zero_grad(self) -> None:
        super().zero_grad()
        self.passes = 0

    def run(self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep, mode: PassMode) -> None:
        if mode != "forward":
            self.passes += 1
            if self.passes == 3:
                super().zero_grad()
        super().run(micro_batches, step, mode)


class HalfRateFrom24Updates(Packed):
    """Updates from the 24th on are half as large."""

    def step(self, scale: float, lr: float, count: int) -> None:
        super().step(scale, lr / 2 if count >= 24 else lr, count)


class ZeroFromPosition1023(Packed):
    """Log-probs from position 1,023 on are 0."""

    def outputs(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        output = super().outputs(micro_batch, step)
        if output.logprobs is None:
            return output
        positions = torch.cat([torch.arange(length) for length in micro_batch.lengths])
        return replace(output, logprobs=torch.where(positions < 1023, output.logprobs, 0.0))


class FifthEqualTokenIsSure(Packed):
    """The log-prob of the fifth equal token in a row is 0."""

    def outputs(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        output = super().outputs(micro_batch, step)
        if output.logprobs is None:
            return output
        ids = micro_batch.input_ids
        equal = torch.arange(len(ids)) >= 4
        for distance in range(1, min(5, len(ids))):
            equal[distance:] &= ids[distance:] == ids[:-distance]
        return replace(output, logprobs=torch.where(equal, 0.0, output.logprobs))


class MicroBatchesBehind32(Packed):
    """Micro-batches behind the 32nd have no backward pass."""

    def run(self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep, mode: PassMode) -> None:
        super().run(micro_batches[:32], step, mode)
        with torch.no_grad():
            HFBackend.run(self, micro_batches[32:], step, "forward")


THRESHOLDS = (
    (ThirdCallDropsTwo, r"calls=3,"),
    (HalfRateFrom24Updates, r"updates=31, watched=True|updates=2\d"),
    (ZeroFromPosition1023, r"length=102[45]"),
    (FifthEqualTokenIsSure, r"tokens='equal'"),
    (MicroBatchesBehind32, r"Cut\(33\)"),
)
"""Each fault with the part of the smallest calls that shows its threshold."""


@Mutant("I20.many-updates", "gradients of 0 that are taken for none (I20)", "after 16 updates")
class ZeroGradientsAreNone(Packed):
    """There is no update where all gradients are 0."""

    def step(self, scale: float, lr: float, count: int) -> None:
        if any(bool(grad.any()) for _, grad in self.gradients()):
            super().step(scale, lr, count)
