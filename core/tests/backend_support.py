"""Backends that break the contract or fail, and calls of them on ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from core_rl.backend.loss import LossSpec
from core_rl.backend.meta import SaveLoadMeta, StatePart
from core_rl.backend.metrics import Metric
from core_rl.backend.protocols import SupportsOwnExport, SupportsOwnGradNorm, SupportsOwnOffload
from core_rl.backend.steps import MicroBatchStep
from core_rl.backend.tensors import LocalSlice, NamedTensors
from core_rl.backend.train_backend import BuildContext, TrainBackend
from core_rl.config.capability import Capability
from core_rl.config.engine import TrainEngineConfig
from core_rl.data.batch import SequenceBatch
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.data.outputs import ModelOutput
from core_rl.engine.train import TrainEngine
from core_rl.reference.train import ReferenceBackend
from core_rl.registry.spec import PROTOCOL_VERSION, EngineSpec
from core_rl.toolkit.hf_state import HFShardedState

NORM = "model.norm.weight"
ONE = MicroBatchSpec(count=1)


def spec(backend: type[TrainBackend[TrainEngineConfig]], *capabilities: Capability) -> EngineSpec:
    """A spec for ``backend``."""
    return EngineSpec(
        name=backend.__name__.lower(),
        kind="train",
        protocol=PROTOCOL_VERSION,
        factory=f"{backend.__module__}:{backend.__name__}",
        config="core_rl.reference:ReferenceConfig",
        capabilities=frozenset(capabilities),
    )


# ----------------------------------------------------------- against the contract


class Bent(HFShardedState):
    """The state of a backend; `bend` gives other slices for one of `NORM`."""

    def __init__(self, state: HFShardedState, bend: Callable[[LocalSlice], list[LocalSlice]]) -> None:
        vars(self).update(vars(state))
        self.bend = bend

    def local(self, kind: str) -> Iterator[LocalSlice]:
        for part in super().local(kind):
            yield from self.bend(part) if part.name == NORM else [part]


class Overlapping(ReferenceBackend):
    """The last element of a vector is there twice."""

    def state(self) -> HFShardedState:
        return Bent(
            super().state(), lambda part: [part, replace(part, offsets=(15,), tensor=part.tensor[15:])]
        )


class Gapped(ReferenceBackend):
    """The last element of a vector is missing."""

    def state(self) -> HFShardedState:
        return Bent(super().state(), lambda part: [replace(part, tensor=part.tensor[:-1])])


class Outside(ReferenceBackend):
    """A vector begins one element too late."""

    def state(self) -> HFShardedState:
        return Bent(super().state(), lambda part: [replace(part, offsets=(1,))])


class Renamed(ReferenceBackend):
    """A slice has a name that is not in ``shapes()``."""

    def state(self) -> HFShardedState:
        return Bent(super().state(), lambda part: [replace(part, name="norm")])


class NamesOffload(ReferenceBackend, SupportsOwnOffload):
    """Offloads by itself, without the capability."""

    def offload(self, part: StatePart) -> None:
        """Leave everything where it is."""

    def onload(self, part: StatePart) -> None:
        """Leave everything where it is."""


class KeepsAState(ReferenceBackend):
    """Attributes of its own, with names that come to mind."""

    def build(self, context: BuildContext[TrainEngineConfig]) -> None:
        super().build(context)
        self._state, self._updates = "mine", -1


OWN_NORM = 1.25


class HasHelpers(ReferenceBackend):
    """Helpers with the names of protocols' methods."""

    def grad_norm(self) -> float:
        return OWN_NORM

    def offload(self) -> None:
        raise AssertionError("the core called a helper")


class ExportsWithoutLoading(ReferenceBackend, SupportsOwnExport):
    """Names a protocol, and has a single method of its two."""

    def export_tensors(self, kind: str) -> NamedTensors:
        return iter(())


class HasItsOwnNorm(ReferenceBackend, SupportsOwnGradNorm):
    """A norm of its own, on purpose."""

    def grad_norm(self) -> float:
        return OWN_NORM


class Bare(TrainBackend[TrainEngineConfig]):
    """Nothing that is optional."""


# ------------------------------------------------------------- failures in a pass

BREAKS_LOSS, BREAKS_BACKEND = -1.0, -2.0
"""Weights of a token at which the loss raises, or the backend."""


class Breaks(ReferenceBackend):
    """Raises in a pass over a token of weight `BREAKS_BACKEND`, on the rank that has it."""

    def outputs(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        if (micro_batch["weight"] == BREAKS_BACKEND).any():
            raise RuntimeError("the kernel broke")
        return super().outputs(micro_batch, step)


BREAKS = spec(Breaks, Capability.DATA_PARALLEL)


class RunsOutOfMemory(Breaks):
    """The error of an accelerator that is full takes the place of the other one."""

    def outputs(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        try:
            return super().outputs(micro_batch, step)
        except RuntimeError as error:
            raise torch.OutOfMemoryError("CUDA out of memory") from error


def touchy_nll(output: ModelOutput, batch: SequenceBatch) -> tuple[Tensor, Mapping[str, Metric]]:
    """The sum of ``-weight * log p``; raises for a weight of `BREAKS_LOSS`."""
    if (batch["weight"] == BREAKS_LOSS).any():
        raise ValueError("a weight is negative")
    return -torch.where(batch.loss_mask, batch["weight"] * output["logprobs"], 0.0).sum(), {}


LOSS = LossSpec(fn=touchy_nll)


def broken(batch: SequenceBatch, weight: float) -> SequenceBatch:
    """``batch`` with ``weight`` at its first token, which one rank gets."""
    weights = batch["weight"].clone()
    weights[0] = weight
    return batch.with_tokens(weight=weights)


def said(action: Callable[[], object]) -> str:
    """Type and message of what ``action`` raises; empty where it raises nothing."""
    try:
        action()
    except Exception as error:  # noqa: BLE001  # the test compares it
        return f"{type(error).__name__}: {error}"
    return ""


def pass_and_step(engine: TrainEngine, batch: SequenceBatch) -> tuple[str, str]:
    """Messages on this rank from a pass over its part of ``batch``, and from the step after it."""
    part = engine.shard_data(batch)
    return said(lambda: engine.forward_backward(part, LOSS, ONE)), said(engine.optimizer_step)


def calls_after_a_pass(engine: TrainEngine, batch: SequenceBatch) -> dict[str, str]:
    """Messages on this rank from a pass over its part of ``batch``, from each later call, and from ``destroy()``."""
    part = engine.shard_data(batch)
    calls: dict[str, Callable[[], object]] = {
        "pass": lambda: engine.forward_backward(part, LOSS, ONE),
        "train_batch": lambda: engine.train_batch(part, LOSS, ONE),
        "forward": lambda: engine.forward(part, ONE),
        "optimizer_zero_grad": engine.optimizer_zero_grad,
        "optimizer_step": engine.optimizer_step,
        "lr_scheduler_step": engine.lr_scheduler_step,
        "named_tensors": lambda: engine.named_tensors("master"),
        "save": lambda: engine.save(SaveLoadMeta(path="nowhere")),
        "train_mode": lambda: engine.train_mode().__enter__(),
        "destroy": engine.destroy,
    }
    return {name: said(call) for name, call in calls.items()}
