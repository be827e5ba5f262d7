"""`TrainBackend`: the interface that a train plugin implements behind `TrainEngine`.

The core calls its methods in states and with arguments that it has checked. All are collective, unless documented
otherwise: every rank of the engine's world is in the same method.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import torch

from core_rl.backend.meta import Scheduling
from core_rl.backend.parameter_rules import ParameterRules
from core_rl.backend.steps import MicroBatchStep
from core_rl.backend.tensors import ShardedState
from core_rl.config.engine import TrainEngineConfig
from core_rl.config.layout import ParallelLayout
from core_rl.data.batch import SequenceBatch
from core_rl.distributed.comm import Comm, RankGroups
from core_rl.distributed.devices import wants_cuda

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["BuildContext", "PassMode", "TrainBackend"]

C = TypeVar("C", bound=TrainEngineConfig)

PassMode = Literal["forward", "accumulate", "last"]
"""``forward`` records no graph. ``accumulate`` runs backward, and more passes may follow before the step; in ``last``
no other pass follows, so reductions may overlap with the backward pass."""


@dataclass(frozen=True, kw_only=True)
class BuildContext(Generic[C]):
    """Everything that a backend needs to build its module and optimizer."""

    config: C
    world: Comm
    """All ranks of the engine."""
    groups: RankGroups
    """As `TrainBackend.groups` returned them."""
    device: torch.device
    """Device on which this rank computes."""
    check_model: Callable[[PretrainedConfig], None] = lambda model: None
    """Raises `UnsupportedCapability` for a model that the engine does not declare, such as a mixture of experts.

    A backend may call it before it reads weights; the core calls it after `build` as well.
    """

    @property
    def layout(self) -> ParallelLayout:
        """The parallel degrees."""
        return self.config.layout

    @property
    def parameter_rules(self) -> ParameterRules | None:
        """The optimizer's settings for each parameter, by checkpoint name; None without an optimizer."""
        optimizer = self.config.optimizer
        return None if optimizer is None else ParameterRules(optimizer)

    @property
    def seed(self) -> int:
        """The seed of the model's random parts. torch's own generators are seeded already."""
        return self.config.seed


class TrainBackend(ABC, Generic[C]):
    """One rank of a sharded model that is trained. Constructed without arguments.

    Attributes that ``build`` creates belong to the backend; the core uses the methods below, and the
    protocols of `core_rl.backend.protocols`, and nothing else.
    """

    micro_batch_multiple: int = 1
    """The number of micro-batches of a pass is a multiple of this (interleaved pipelines)."""

    # ------------------------------------------------------------- required

    @abstractmethod
    def build(self, context: BuildContext[C]) -> None:
        """Build the module and, unless ``config.optimizer`` is None, the optimizer, with moments of 0."""

    @abstractmethod
    def hf_config(self) -> PretrainedConfig:
        """The transformers config of the model with its head, as an export writes it. No collective."""

    @abstractmethod
    def state(self) -> ShardedState:
        """The sharded tensors of this rank. No collective."""

    @abstractmethod
    def run(self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep, mode: PassMode) -> None:
        """For each micro-batch: forward, ``step(output, micro_batch)``, and backward on its result.

        Gradients accumulate. Nothing is divided: the core has scaled the loss. With ``"forward"`` no graph is
        recorded and nothing runs backward.
        """

    @abstractmethod
    def set_training(self, training: bool) -> None:
        """Put the module in training or evaluation mode (dropout)."""

    @abstractmethod
    def zero_grad(self) -> None:
        """Drop all gradients. No collective."""

    @abstractmethod
    def reduce_grads(self) -> None:
        """Leave in each gradient the **sum** over data-parallel ranks, never the mean.

        Called once before a step, a norm or an export, however many passes accumulated. Finishes reductions that a
        pass with mode ``"last"`` started.
        """

    @abstractmethod
    def step(self, scale: float, lr: float, count: int) -> None:
        """Multiply the gradients by ``scale`` (clipping) and update the weights, in float32, with ``lr``.

        ``count`` is the number of this update, from 1: Adam's bias correction uses it.
        """

    @abstractmethod
    def after_load(self, kinds: frozenset[str]) -> None:
        """Refresh tensors derived from ``kinds`` that were set, such as compute copies of the weights."""

    # ------------------------------------------------------ with a default

    def groups(self, world: Comm, config: C) -> RankGroups:
        """The process groups, before `build`; by default all ranks are data parallel."""
        return RankGroups(data_parallel=world)

    def verify(self) -> None:
        """Raise `UnsupportedCapability` for a model that this backend computes wrong; once, after `build`.

        The model is in evaluation mode and has its weights.
        """

    def check_sharing(self) -> None:
        """Raise `UnsupportedCapability` for a model or layout without ``Capability.SHARED_PREFIX``, which is declared.

        Local, no collective.
        """

    def synchronize(self) -> None:
        """Finish asynchronous gathers and copies before the state is read."""

    def abort(self) -> None:
        """Free gathered weights, hooks and handles after a failed pass. Local, no collective."""

    def teardown(self) -> None:
        """Free what `groups` and `build` made beyond what dropping the object frees; also after a failed build."""

    def check_model(self, config: C) -> None:
        """Raise `ConfigError` or `UnsupportedCapability` where the layout does not fit the model.

        Called in the driver before any rank starts, so that nothing may be built with memory. `build` checks the same.
        """

    def scheduling(self, config: C) -> Scheduling:
        """Resources that one rank needs. No collective, and before `build`."""
        return Scheduling(gpu=int(wants_cuda(config.device)))


AnyTrainBackend = TrainBackend[Any]
