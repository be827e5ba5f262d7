"""Optional methods of an `InferenceBackend`: one protocol for each capability that has methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from core_rl.backend.inference_backend import InferenceContext, TopLogprobs
from core_rl.backend.meta import WeightUpdateMeta
from core_rl.config.capability import Capability
from core_rl.data.batch import SequenceBatch

__all__ = [
    "INFERENCE_PROTOCOLS",
    "MachineProcess",
    "SupportsLaunchServer",
    "SupportsPause",
    "SupportsReleaseMemory",
    "SupportsScore",
    "SupportsServersOnMachines",
    "SupportsTopLogprobs",
    "SupportsWeightUpdate",
]


@runtime_checkable
class SupportsWeightUpdate(Protocol):
    """Receives weights by the methods whose ``sync_*`` capabilities are declared."""

    def update_weights(self, meta: WeightUpdateMeta) -> None:
        """Install new weights; tokens that they draw carry ``meta.version``. One call at a time.

        Requests in flight continue under the new weights or end under the old ones. Prefix caches are
        flushed, and cached states of a request that continues are computed anew: a token's log-prob is that
        of one version of the weights. If it raises, the old weights and their version are still there, and
        no token was drawn by a mixture of the two.
        """


@runtime_checkable
class SupportsScore(Protocol):
    """Computes log-probs of given tokens."""

    def score(self, batch: SequenceBatch, temperature: float) -> Tensor:
        """Log-probs of the tokens of ``batch``, float32 ``[T]``, 0 at first tokens."""


@runtime_checkable
class SupportsTopLogprobs(Protocol):
    """Computes the most likely tokens at given positions."""

    def top_logprobs(self, batch: SequenceBatch, k: int, temperature: float) -> TopLogprobs:
        """The ``k`` most likely tokens at each position of ``batch``."""


@runtime_checkable
class SupportsPause(Protocol):
    """Interrupts requests in flight; the core already holds back new ones."""

    def pause(self) -> None:
        """Interrupt the requests in flight until `resume`; if it raises, they continue."""

    def resume(self) -> None:
        """Continue the interrupted requests."""


@runtime_checkable
class SupportsReleaseMemory(Protocol):
    """Frees the accelerator's memory for a while."""

    def release_memory(self) -> None:
        """Free the memory; nothing is in flight."""

    def resume_memory(self) -> None:
        """Allocate the memory again, with the same weights and version, or with weights that arrived meanwhile.

        An engine that cannot receive weights while its memory is released raises `EngineStateError` from the update.
        """


@runtime_checkable
class SupportsLaunchServer(Protocol):
    """Starts servers of its own."""

    # Any: a protocol that is generic in the config could not be checked with isinstance.
    def launch_server(self, context: InferenceContext[Any], count: int) -> tuple[str, ...]:
        """Start ``count`` servers before `build`, wait until they are ready, and return their addresses."""


class MachineProcess(Protocol):
    """A process on a machine of a cluster, for one server; its children end with it. Any thread may call it."""

    machine: int
    """The number of the machine."""
    devices: tuple[int, ...]
    """The accelerators of the server there."""

    @property
    def address(self) -> str:
        """The address under which other machines reach this one. Raises `GroupError` for a lost machine."""

    def start(self) -> None:
        """Start the process, again where it is gone. Raises `GroupError`."""

    def call(self, fn: Callable[..., Any], *args: Any) -> Any:
        """``fn(*args)`` in the process; ``fn`` is a function of a module. Raises its error, and `GroupError`."""

    def close(self) -> None:
        """End the process and its children. Further calls do nothing."""


@runtime_checkable
class SupportsServersOnMachines(Protocol):
    """Starts servers on the machines of a cluster; needs no capability but ``launch_server``."""

    def launch_servers_on(
        self, context: InferenceContext[Any], processes: Sequence[MachineProcess]
    ) -> tuple[str, ...]:
        """As `SupportsLaunchServer.launch_server`, with a server in each of ``processes``, which `teardown` closes."""


INFERENCE_PROTOCOLS: Mapping[Capability, tuple[type, ...]] = MappingProxyType(
    {
        Capability.SYNC_DISK: (SupportsWeightUpdate,),
        Capability.SYNC_TENSOR: (SupportsWeightUpdate,),
        Capability.SYNC_DISTRIBUTED: (SupportsWeightUpdate,),
        Capability.SYNC_LORA: (SupportsWeightUpdate,),
        Capability.SYNC_DELTA: (SupportsWeightUpdate,),
        Capability.SCORE: (SupportsScore,),
        Capability.TOP_LOGPROBS: (SupportsTopLogprobs,),
        Capability.PAUSE: (SupportsPause,),
        Capability.RELEASE_MEMORY: (SupportsReleaseMemory,),
        Capability.LAUNCH_SERVER: (SupportsLaunchServer,),
    }
)
"""The protocol that a backend with a declared capability implements."""
