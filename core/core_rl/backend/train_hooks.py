"""What a plugin writes: the hooks behind the public methods of `TrainEngine`.

Hooks are called by the core only, in states and with arguments that it has checked. All are
collective: every rank of the engine's world is in the same hook.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core_rl.backend.meta import FinetuneSpec, Scheduling, StatePart, TensorKind
from core_rl.backend.named_tensors import NamedTensors, TensorSource
from core_rl.backend.steps import MicroBatchStep
from core_rl.data.batch import SequenceBatch
from core_rl.distributed.comm import Comm, RankGroups
from core_rl.distributed.process_group import RankAddress
from core_rl.errors import UnsupportedCapability
from core_rl.state.grad_norm import GradShard

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from core_rl.checkpoint.shards import Shard

__all__ = ["TrainHooks"]


class TrainHooks(ABC):
    """The hooks of a train engine. The abstract ones are required; the others serve a capability."""

    # ------------------------------------------------------------- required

    @abstractmethod
    def _build(self, addr: RankAddress, ft_spec: FinetuneSpec) -> None:
        """Build the module and, unless ``config.optimizer`` is None, the optimizer. The process group is up."""

    @abstractmethod
    def _hf_config(self) -> PretrainedConfig:
        """The transformers config of the model with its head, as an export writes it."""

    @abstractmethod
    def _tensor_shapes(self, kind: TensorKind) -> dict[str, tuple[int, ...]]:
        """Names and full shapes of the tensors of ``kind``, in the order of `_named_tensors`. No collective."""

    @abstractmethod
    def _named_tensors(self, kind: TensorKind) -> NamedTensors:
        """Stream the tensors of ``kind`` in full. Moments of an optimizer that never stepped are zeros."""

    @abstractmethod
    def _load_named_tensors(self, kind: TensorKind, source: TensorSource) -> None:
        """The inverse: names and shapes are already checked; read only what this rank owns.

        ``params`` and ``master`` both set the master weights and the compute copies.
        """

    @abstractmethod
    def _set_training(self, training: bool) -> None:
        """Put the module in training or evaluation mode (dropout)."""

    @abstractmethod
    def _run(self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep, forward_only: bool) -> None:
        """For each micro-batch: forward, ``step(output, micro_batch)``, and backward on what it returns.

        Gradients accumulate. Nothing is divided: the core has scaled the loss. With
        ``forward_only`` no graph is recorded and nothing runs backward.
        """

    @abstractmethod
    def _zero_grad(self) -> None:
        """Drop all gradients."""

    @abstractmethod
    def _reduce_grads(self) -> None:
        """Leave in each gradient the **sum** over data-parallel ranks. Called once, before a step, a
        norm or an export, however many passes accumulated.
        """

    @abstractmethod
    def _grad_shards(self) -> Iterable[GradShard]:
        """This rank's parts of all gradients, after `_reduce_grads`."""

    @abstractmethod
    def _set_lr(self, lr: float) -> None:
        """Use this learning rate in the next `_step`."""

    @abstractmethod
    def _step(self, scale: float) -> None:
        """Multiply the gradients by ``scale`` (clipping) and run the optimizer, in float32."""

    @abstractmethod
    def _set_update_count(self, count: int) -> None:
        """Set Adam's step count, which its bias correction uses, to ``count``."""

    # ------------------------------------------------- with a useful default

    def _groups(self, world: Comm) -> RankGroups:
        """The process groups, right after ``init_process_group``; by default all ranks are data parallel."""
        return RankGroups(data_parallel=world)

    def _teardown(self) -> None:  # noqa: B027  an engine may have nothing to free
        """Free what `_build` made beyond what dropping the attributes frees."""

    def _scheduling(self) -> Scheduling:
        """Resources that one rank needs."""
        return Scheduling()

    @property
    def _micro_batch_multiple(self) -> int:
        """The number of micro-batches must be a multiple of this (interleaved pipelines)."""
        return 1

    # ------------------------------------------------- behind a capability

    def _save_shards(self, directory: Path, with_optimizer: bool) -> None:
        """Write this rank's weights in the backend's own parallel format, and its moments and random state if asked."""
        raise UnsupportedCapability(f"{type(self).__name__} does not implement sharded checkpoints")

    def _snapshot_shards(self, with_optimizer: bool) -> Callable[[Path], None] | None:
        """A true copy in host memory of what `_save_shards` writes, as a function that writes it; or None.

        The function runs in a thread while training goes on, without collectives. Where the hook
        returns None, a save in the background calls `_save_shards` before training goes on.
        """
        return None

    def _snapshot_tensors(self, kinds: Sequence[TensorKind]) -> list[Shard] | None:
        """True copies in host memory of what `_named_tensors` streams: of each tensor the parts that this rank holds.

        They are called ``KIND/NAME``, and each part is on one rank only. Where the hook returns None, on
        all ranks alike, a save of ``portable`` or ``hf`` in the background streams before training goes on.
        """
        return None

    def _load_shards(self, directory: Path, with_optimizer: bool) -> None:
        """Read what `_save_shards` wrote, perhaps at another layout; without the optimizer, the weights alone.

        Moments and random state then stay as they are, whether the files hold some or not.
        """
        raise UnsupportedCapability(f"{type(self).__name__} does not implement sharded checkpoints")

    def _offload(self, part: StatePart) -> None:
        """Copy weights with gradients, or optimizer state, to host memory, and free what they take.

        On the CPU as well: what is offloaded is not there, on any device.
        """
        raise UnsupportedCapability(f"{type(self).__name__} does not implement offloading")

    def _onload(self, part: StatePart) -> None:
        """The inverse of `_offload`, bit for bit."""
        raise UnsupportedCapability(f"{type(self).__name__} does not implement offloading")

    def _adapter_disabled(self) -> AbstractContextManager[None]:
        """A context in which the adapters are off."""
        raise UnsupportedCapability(f"{type(self).__name__} does not implement adapters")

    def _adapter_config(self) -> dict[str, Any]:
        """The ``adapter_config.json`` of ``peft``, as JSON values."""
        raise UnsupportedCapability(f"{type(self).__name__} does not implement adapters")

    def _base_digest(self) -> str:
        """What tells the weights below the adapter from others, the same at every layout and on all ranks."""
        raise UnsupportedCapability(f"{type(self).__name__} does not implement adapters")
