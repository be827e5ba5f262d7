"""What a plugin writes: the hooks behind the public methods of `InferenceEngine`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from core_rl.backend.meta import FinetuneSpec, Scheduling, WeightUpdateMeta
from core_rl.data.batch import SequenceBatch
from core_rl.data.requests import LLMRequest, LLMResponse
from core_rl.errors import UnsupportedCapability

__all__ = ["InferenceHooks", "ModelLimits", "TopLogprobs"]


@dataclass(frozen=True, kw_only=True)
class ModelLimits:
    """What the served model takes."""

    vocab_size: int
    """Token ids are below this."""
    context_length: int | None = None
    """The most tokens of prompt and answer together; None for no limit."""


@dataclass(frozen=True, kw_only=True)
class TopLogprobs:
    """The most likely tokens at each position, most likely first; zeros at first tokens."""

    ids: Tensor
    """Int64 ``[T, k]``."""
    logprobs: Tensor
    """Float32 ``[T, k]``."""


class InferenceHooks(ABC):
    """The hooks of an inference engine. The abstract ones are required; the others serve a capability.

    The core calls them in states and with arguments that it has checked. `_agenerate` runs on the
    caller's event loop, of which there may be several; all others run in threads, and may block.
    """

    # ------------------------------------------------------------- required

    @abstractmethod
    def _build(self, addresses: tuple[str, ...], ft_spec: FinetuneSpec) -> ModelLimits:
        """Load the model, or connect to the servers at ``addresses``; returns what the model takes.

        Connected servers serve the weights of ``config.model`` afterwards, whatever they had before.
        """

    @abstractmethod
    async def _agenerate(self, request: LLMRequest) -> LLMResponse:
        """Continue one prompt. Must not block the loop, and gives up when it is cancelled.

        Each token carries the version of the weights that drew it: that of the last finished
        `_update_weights` or `_set_version`, read once for each token and together with the weights.
        """

    @abstractmethod
    def _set_version(self, version: int) -> None:
        """Tokens from now on carry ``version``; the weights are unchanged."""

    # ------------------------------------------------- with a useful default

    def _teardown(self) -> None:  # noqa: B027  (many engines have nothing to free)
        """Free what `_build` and `_launch_server` made, as far as they came; nothing is in flight any more."""

    def _scheduling(self) -> Scheduling:
        """Resources that one server needs."""
        return Scheduling()

    # ------------------------------------------------- behind a capability

    def _update_weights(self, meta: WeightUpdateMeta) -> None:
        """Take new weights; tokens that they draw carry ``meta.version``. One call at a time.

        Requests in flight go on under the new weights or end under the old ones. Prefix caches are
        flushed, and what is cached of a request that goes on is computed anew: a token's log-prob is that
        of one version of the weights. If it raises, the old weights and their version are still there.
        """
        raise UnsupportedCapability(
            f"{type(self).__name__} does not implement weight sync by {meta.method!r}"
        )

    def _score(self, batch: SequenceBatch, temperature: float) -> Tensor:
        """Log-probs of the given tokens, float32 ``[T]``, 0 at first tokens."""
        raise UnsupportedCapability(f"{type(self).__name__} does not implement score()")

    def _top_logprobs(self, batch: SequenceBatch, k: int, temperature: float) -> TopLogprobs:
        """The ``k`` most likely tokens at each position."""
        raise UnsupportedCapability(f"{type(self).__name__} does not implement top_logprobs()")

    def _pause(self) -> None:
        """Interrupt the requests in flight until `_resume`; the core already holds back new ones."""
        raise UnsupportedCapability(f"{type(self).__name__} does not implement pause()")

    def _resume(self) -> None:
        """Go on with the interrupted requests."""
        raise UnsupportedCapability(f"{type(self).__name__} does not implement resume()")

    def _release_memory(self) -> None:
        """Give the accelerator's memory back; nothing is in flight."""
        raise UnsupportedCapability(f"{type(self).__name__} does not implement release_memory()")

    def _resume_memory(self) -> None:
        """Take the memory again, with the same weights."""
        raise UnsupportedCapability(f"{type(self).__name__} does not implement resume_memory()")

    def _launch_server(self, count: int) -> tuple[str, ...]:
        """Start ``count`` servers as the config says, wait until they are ready, and return their addresses."""
        raise UnsupportedCapability(f"{type(self).__name__} does not implement launch_server()")
