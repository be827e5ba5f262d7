"""Engines that keep something too long: answers, masks, old weights, tensors, and settings of the process."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from core_rl.backend.meta import StatePart
from core_rl.backend.protocols import MemoryPart
from core_rl.backend.steps import MicroBatchStep
from core_rl.backend.tensors import TensorSource
from core_rl.backend.train_backend import PassMode
from core_rl.data.batch import SequenceBatch
from core_rl.data.outputs import ModelOutput
from core_rl.reference.train import ReferenceBackend
from mutants.bases import OwnExport, OwnOffload, TrainContext
from mutants.zoo import Mutant


@Mutant(
    "I11.load-after-use", "vllm #44371: answers that outlive a load", "logprobs after 'sharded' was loaded"
)
class AnswersFromMemory(ReferenceBackend):
    """Answers are kept by the batch, and forgotten after a step or a load of weights alone."""

    def build(self, context: TrainContext) -> None:
        self._answers: dict[str, ModelOutput] = {}
        super().build(context)

    def outputs(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        if torch.is_grad_enabled():
            return super().outputs(micro_batch, step)
        fields = (micro_batch.input_ids, micro_batch.cu_seqlens, step.outputs, step.temperature)
        key = repr([field.tolist() if isinstance(field, Tensor) else field for field in fields])
        if key not in self._answers:
            self._answers[key] = super().outputs(micro_batch, step)
        return self._answers[key]

    def step(self, scale: float, lr: float, count: int) -> None:
        super().step(scale, lr, count)
        self._answers.clear()

    def after_load(self, kinds: frozenset[str]) -> None:
        # Of a checkpoint, weights come before moments.
        if kinds == {"master"}:
            self._before = dict(self._answers)
            self._answers.clear()
        else:
            self._answers.update(self._before)


@Mutant("I11.adapter-alone", "vllm #44371: answers that outlive an adapter", "outputs after a load")
class AnswersOutliveAdapters(AnswersFromMemory):
    """The same, and a load of an adapter alone forgets nothing."""

    def after_load(self, kinds: frozenset[str]) -> None:
        if kinds != {"adapter"}:
            super().after_load(kinds)


@Mutant(
    "I11.load-after-use", "NeMo-RL #2372: a load that the next step undoes", "a step after 'hf' was loaded"
)
class MastersStayBehind(OwnExport):
    """A load of a model directory does not reach the float32 weights that the next step begins from."""

    _masters: list[Tensor] | None = None

    @torch.no_grad()
    def step(self, scale: float, lr: float, count: int) -> None:
        parameters = list(self.model.parameters())
        for parameter, master in zip(parameters, self._masters or parameters, strict=True):
            parameter.copy_(master)
        super().step(scale, lr, count)
        self._masters = [parameter.detach().clone() for parameter in parameters]

    def import_tensors(self, kind: str, source: TensorSource) -> None:
        super().import_tensors(kind, source)
        if kind == "master":
            self._masters = None


@Mutant(
    "I13.hidden-caches",
    "masks that are cached by the size of the batch",
    "log-probs of the same tokens, cut elsewhere",
)
class CutsBySize(ReferenceBackend):
    """Boundaries of sequences are kept by the number of tokens."""

    def build(self, context: TrainContext) -> None:
        self._boundaries: dict[int, Tensor] = {}
        super().build(context)

    def outputs(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        bounds = self._boundaries.setdefault(micro_batch.num_tokens, micro_batch.cu_seqlens)
        if len(bounds) != len(micro_batch.cu_seqlens):
            return super().outputs(micro_batch, step)
        cut = SequenceBatch(input_ids=micro_batch.input_ids, cu_seqlens=bounds, tokens=micro_batch.tokens)
        return super().outputs(cut, step)


@Mutant(
    "contract.global-state",
    "a default dtype that is left behind",
    r"forward\(\) left torch.get_default_dtype\(\) = torch.bfloat16",
)
class LeavesBfloat16(ReferenceBackend):
    """The default dtype is bfloat16 after a forward pass."""

    def run(self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep, mode: PassMode) -> None:
        super().run(micro_batches, step, mode)
        if mode == "forward":
            torch.set_default_dtype(torch.bfloat16)


@Mutant(
    "contract.global-state", "a seed for the whole process", r"load\(\) left random.getstate\(\) another one"
)
class SeedsInALoad(ReferenceBackend):
    """A load seeds the random numbers of the whole process."""

    def after_load(self, kinds: frozenset[str]) -> None:
        super().after_load(kinds)
        random.seed(0)


@Mutant(
    "contract.flat-memory",
    "a leak of one tensor per step",
    r"50 calls of train_batch\(\) left (49|5\d) more tensors",
)
class KeepsEveryLoss(ReferenceBackend):
    """Losses are kept for an unused mean."""

    def build(self, context: TrainContext) -> None:
        self._losses: list[Tensor] = []
        super().build(context)

    def run(self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep, mode: PassMode) -> None:
        for micro_batch in micro_batches:
            loss = step(self.outputs(micro_batch, step), micro_batch)
            if mode != "forward":
                loss.backward()
                self._losses.append(loss)


@Mutant(
    "contract.flat-memory",
    "a history without a bound",
    r"50 calls of forward\(\) left 0 more tensors and 600 more bytes",
)
class AppendsToAHistory(ReferenceBackend):
    """The log-probs of all forward passes are kept in one tensor that grows."""

    def build(self, context: TrainContext) -> None:
        self._history = torch.empty(0)
        super().build(context)

    def outputs(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        outputs = super().outputs(micro_batch, step)
        if not torch.is_grad_enabled():
            self._history = torch.cat([self._history, outputs["logprobs"]])
        return outputs


@Mutant(
    "contract.offloaded-memory", "offloading that frees nothing", r"offload\(\) leaves (\d+) of the \1 bytes"
)
class OffloadsNothing(ReferenceBackend):
    """No tensor is named as the memory of any part."""

    def memory(self, part: MemoryPart) -> Iterable[Tensor]:
        return ()


@Mutant(
    "contract.offloaded-memory", "moments that stay on the device", r"offload\(\) leaves \d+ of the \d+ bytes"
)
class OffloadsNoMoments(ReferenceBackend):
    """The moments stay on the device."""

    def memory(self, part: MemoryPart) -> Iterable[Tensor]:
        return super().memory(part) if part != "optimizer" else ()


@Mutant(
    "contract.offloaded-memory", "offloading that frees nothing", r"offload\(\) leaves (\d+) of the \1 bytes"
)
class SaysItIsOffloaded(OwnOffload):
    """No-op in both methods."""

    def offload(self, part: StatePart) -> None:
        """Nothing."""

    def onload(self, part: StatePart) -> None:
        """Nothing."""


class _SeedIsOff(ReferenceBackend):
    """Models for which `off` holds are drawn from another seed."""

    def off(self, context: TrainContext) -> bool:
        raise NotImplementedError

    def build(self, context: TrainContext) -> None:
        seed = context.seed + self.off(context)
        super().build(replace(context, config=context.config.model_copy(update={"seed": seed})))


@Mutant("I3.seeded-draws", "two engines that begin with two models", "weights drawn from a config")
class ModelsOfAnotherSeed(_SeedIsOff):
    """Weights from a config are drawn from the seed of something else."""

    def off(self, context: TrainContext) -> bool:
        return context.config.model.path is None


@Mutant("I3.seeded-draws", "a head of another seed", "a model with a new head: 1 of")
class HeadsOfAnotherSeed(_SeedIsOff):
    """The same of a new head."""

    def off(self, context: TrainContext) -> bool:
        return context.config.model.head == "value"


@Mutant("I3.seeded-draws", "an adapter of another seed", "a model with a new adapter")
class AdaptersOfAnotherSeed(_SeedIsOff):
    """The same of a new adapter."""

    def off(self, context: TrainContext) -> bool:
        return context.config.model.lora is not None
