"""The engine with one planted bug each, of kinds that engines shipped, and the check that must fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import mindspore
import numpy as np
import pytest
import torch
from mindspore import Tensor, mint

from core_rl.backend.steps import MicroBatchStep
from core_rl.backend.train_backend import PassMode
from core_rl.data.batch import SequenceBatch
from core_rl_mindspore import model
from core_rl_mindspore.backend import MindSporeBackend
from core_rl_mindspore.crossing import to_mindspore
from core_rl_mindspore.model import PackedTokens

Context = Any
KILLED_BY: dict[str, str] = {}
"""The check for each mutant."""


def killed_by(check: str) -> Callable[[type[MindSporeBackend]], type[MindSporeBackend]]:
    """Record the check that a mutant must fail."""

    def record(mutant: type[MindSporeBackend]) -> type[MindSporeBackend]:
        KILLED_BY[mutant.__name__] = check
        return mutant

    return record


@killed_by("I2.data-parallel")
class AveragedGradients(MindSporeBackend):
    """The mean over ranks, where the core asks for the sum."""

    def reduce_grads(self) -> None:
        super().reduce_grads()
        for grad in self.state().tensors["grads"].values():
            grad.div_(self.context.groups.data_parallel.size)


@killed_by("I5.two-calls")
class GradientsOfLastCall(MindSporeBackend):
    """A pass forgets the gradients of the passes before it."""

    def run(self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep, mode: PassMode) -> None:
        self.zero_grad()
        super().run(micro_batches, step, mode)


@killed_by("I1.micro-batches")
class GradientsOfLastMicroBatch(MindSporeBackend):
    """Gradients are set, not added."""

    def add_gradients(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> None:
        self.zero_grad()
        super().add_gradients(micro_batch, step)


@killed_by("I4.clipping")
class Unclipped(MindSporeBackend):
    """The factor of the gradients is ignored."""

    def step(self, scale: float, lr: float, count: int) -> None:
        super().step(1.0, lr, count)


@killed_by("I20.adamw")
class UncorrectedMoments(MindSporeBackend):
    """Adam without the correction of its first steps."""

    def step(self, scale: float, lr: float, count: int) -> None:
        super().step(scale, lr, count + 10**6)


@killed_by("I20.adamw")
class DecayedNorms(MindSporeBackend):
    """Vectors decay as matrices do."""

    def build(self, context: Context) -> None:
        super().build(context)
        decay = context.config.optimizer.weight_decay if context.config.optimizer else 0.0
        self.trained = {
            name: replace(one, options=replace(one.options, weight_decay=decay))
            for name, one in self.trained.items()
        }


@killed_by("I6.neighbours")
class RunningPositions(MindSporeBackend):
    """Positions go on over the sequences of a pack; attention sees the neighbours before."""

    def build(self, context: Context) -> None:
        super().build(context)
        construct = self.decoder.construct
        joined = SequenceBatch.from_sequences
        cast("Any", self.decoder).construct = lambda batch: construct(joined([batch.input_ids]))


@killed_by("I8.temperature")
class IgnoredTemperature(MindSporeBackend):
    """Logits are not divided."""

    def loss(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> Tensor:
        cast("Any", step).temperature = 1.0
        return super().loss(micro_batch, step)


@killed_by("I11.resume")
class CopiedMoments(MindSporeBackend):
    """The state has copies of the moments: a checkpoint saves and loads zeros."""

    def build(self, context: Context) -> None:
        super().build(context)
        tensors = dict(self._state.tensors)
        for kind in ("exp_avg", "exp_avg_sq"):
            tensors[kind] = {name: tensor.clone() for name, tensor in tensors[kind].items()}
        self._state = replace(self._state, tensors=tensors)


@killed_by("I12.tensor")
class StaleExport(MindSporeBackend):
    """Exports have the first weights."""

    def build(self, context: Context) -> None:
        super().build(context)
        first = {name: tensor.clone() for name, tensor in self._state.tensors["params"].items()}
        self._state = replace(self._state, tensors={**self._state.tensors, "params": first})


@killed_by("I20.frozen")
class ThawedWeights(MindSporeBackend):
    """Frozen parameters are trained."""

    def build(self, context: Context) -> None:
        frozen = context.config.model.model_copy(update={"frozen": ()})
        super().build(replace(context, config=context.config.model_copy(update={"model": frozen})))


@killed_by("I7.logprobs")
class SortedSequences(MindSporeBackend):
    """Attention leaves the sequences in the order of their lengths."""

    def build(self, context: Context) -> None:
        super().build(context)
        for layer in self.decoder.layers:
            layer.attention.construct = _sorting(layer.attention.construct)


def _sorting(construct: Callable[[Tensor, PackedTokens], Tensor]) -> Callable[[Tensor, PackedTokens], Tensor]:
    def constructed(x: Tensor, tokens: PackedTokens) -> Tensor:
        return construct(x, replace(tokens, places=Tensor(np.sort(tokens.places.asnumpy()))))

    return constructed


@killed_by("I1.gradients")
class FaultySoftmax(MindSporeBackend):
    """MindSpore's own softmax, whose gradient is wrong once a single element had one."""

    def add_gradients(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> None:
        one = to_mindspore(torch.ones(2, 2, 1, 1))
        mindspore.grad(lambda x: mint.nn.functional.softmax(x, dim=-1).sum(), 0)(one)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model._Softmax, "apply", lambda x: mint.nn.functional.softmax(x, dim=-1))
            super().add_gradients(micro_batch, step)


@killed_by("I20.adamw")
class InPlaceUpdates(MindSporeBackend):
    """Updates by the methods that change nothing on the CPU."""

    def step(self, scale: float, lr: float, count: int) -> None:
        for one in self.trained.values():
            one.weight.sub_(one.grad * (scale * lr))
