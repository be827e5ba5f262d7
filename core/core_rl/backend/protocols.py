"""Protocols of a train backend: optional methods, and replacements of the core's defaults.

A backend implements a protocol of `TRAIN_PROTOCOLS` by declaring its capability and having its methods. The protocols
of `NAMED_PROTOCOLS` serve no capability: a backend implements them as base classes. A method of the same name in any
other class is a helper, which the core never calls. `core_rl.engine.loading` compares declared and implemented.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from core_rl.backend.meta import StatePart
from core_rl.backend.tensors import NamedTensors, TensorSource
from core_rl.config.capability import Capability
from core_rl.data.batch import SequenceBatch

__all__ = [
    "NAMED_PROTOCOLS",
    "TRAIN_PROTOCOLS",
    "LowRank",
    "MemoryPart",
    "SupportsLora",
    "SupportsOffload",
    "SupportsOpaqueState",
    "SupportsOwnCheckpoint",
    "SupportsOwnExport",
    "SupportsOwnGradNorm",
    "SupportsOwnOffload",
    "SupportsRngState",
    "SupportsTaps",
]

MemoryPart = Literal["weights", "gradients", "optimizer"]
"""Parts of a rank's memory; ``weights`` includes float32 master weights, ``optimizer`` is the moments."""


@dataclass(frozen=True, kw_only=True)
class LowRank:
    """Product that an adapter adds to one weight ``[out, in]``: ``scaling * B @ A``."""

    a: str
    """The checkpoint name of ``A [rank, in]``."""
    b: str
    """The checkpoint name of ``B [out, rank]``."""
    scaling: float
    transposed: bool = False
    """The weight is stored as ``[in, out]`` (GPT-2's ``Conv1D``)."""

    def added_to(self, weight: Tensor, a: Tensor, b: Tensor, region: tuple[slice, ...]) -> Tensor:
        """A new tensor: ``weight``, the ``region`` of a whole one, plus its part of the product of whole factors."""
        rows, columns = reversed(region) if self.transposed else region
        product = b[rows] @ a[:, columns]
        return torch.add(weight, product.T if self.transposed else product, alpha=self.scaling)


@runtime_checkable
class SupportsLora(Protocol):
    """Adapters (``model.lora``). Merging, export and ``peft``'s file format are the core's."""

    def low_rank(self) -> Mapping[str, LowRank]:
        """The product for each adapted weight, by its checkpoint name; the same on all ranks, no collective."""

    def adapter_config(self) -> dict[str, Any]:
        """The ``adapter_config.json`` of ``peft``, as JSON values."""

    def set_adapter(self, enabled: bool) -> None:
        """Turn the adapter on or off in forward passes."""


@runtime_checkable
class SupportsOffload(Protocol):
    """Offloading to host memory. The core copies storages to the host, frees them, and makes them again.

    Memory of another framework, which torch cannot free, is for `SupportsOwnOffload`.
    """

    def memory(self, part: MemoryPart) -> Iterable[Tensor]:
        """Tensors whose storages hold ``part`` on this rank; each storage belongs to one part. No collective."""


@runtime_checkable
class SupportsTaps(Protocol):
    """Hidden states between layers, so that the first layer that is off can be named."""

    def tap(
        self, micro_batches: Sequence[SequenceBatch]
    ) -> AbstractContextManager[Mapping[int, Sequence[Tensor]]]:
        """Record the states during a forward pass over ``micro_batches`` inside the context. Collective.

        After the context, the mapping has the output of each layer of this rank by number, from 1, and the input of
        layer 1 by 0: for each micro-batch float32 ``[T, H]`` of all tokens, on the CPU. The core merges all ranks.
        """


class SupportsRngState(ABC):
    """Random number generators of the backend's own, besides torch's."""

    @abstractmethod
    def rng_state(self) -> Mapping[str, Tensor]:
        """This rank's states as uint8 tensors."""

    @abstractmethod
    def load_rng_state(self, states: Mapping[str, Tensor]) -> None:
        """Set them."""


class SupportsOpaqueState(ABC):
    """State that has no parameter's shape, such as the scales of 8-bit moments; loads at the same layout only."""

    @abstractmethod
    def opaque_state(self) -> Mapping[str, Tensor]:
        """This rank's state by name."""

    @abstractmethod
    def load_opaque_state(self, state: Mapping[str, Tensor]) -> None:
        """Set it."""


class SupportsOwnGradNorm(ABC):
    """A gradient norm of the backend's own."""

    @abstractmethod
    def grad_norm(self) -> float:
        """The 2-norm of all reduced gradients; the same number on every rank. Collective."""


class SupportsOwnExport(ABC):
    """Streaming and loading of named tensors by the backend itself."""

    @abstractmethod
    def export_tensors(self, kind: str) -> NamedTensors:
        """Stream the tensors of ``kind`` in full. Collective."""

    @abstractmethod
    def import_tensors(self, kind: str, source: TensorSource) -> None:
        """Set the tensors of ``kind``; names and shapes are checked already. Collective."""


class SupportsOwnCheckpoint(ABC):
    """A sharded checkpoint format of the backend's own. Random states of torch are the core's."""

    @abstractmethod
    def save_sharded(self, directory: Path, with_optimizer: bool) -> None:
        """Write this rank's weights, and its moments where asked."""

    @abstractmethod
    def load_sharded(self, directory: Path, with_optimizer: bool) -> None:
        """Read what `save_sharded` wrote, perhaps at another layout; without the optimizer, weights alone."""


@runtime_checkable
class SupportsOwnOffload(Protocol):
    """Offloading by the backend itself."""

    def offload(self, part: StatePart) -> None:
        """Copy weights with gradients, or optimizer state, to host memory, and free their storage."""

    def onload(self, part: StatePart) -> None:
        """The inverse of `offload`, bit for bit."""


TRAIN_PROTOCOLS: Mapping[Capability, tuple[type, ...]] = {
    Capability.LORA: (SupportsLora,),
    Capability.OFFLOAD: (SupportsOffload, SupportsOwnOffload),
    Capability.TAPS: (SupportsTaps,),
}
"""Protocols of capabilities with methods, of which a backend implements at least one."""
NAMED_PROTOCOLS: tuple[type, ...] = (
    SupportsRngState,
    SupportsOpaqueState,
    SupportsOwnGradNorm,
    SupportsOwnExport,
    SupportsOwnCheckpoint,
)
"""Base classes without a capability, whose methods replace or extend a default of the core."""
