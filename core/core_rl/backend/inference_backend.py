"""`InferenceBackend`: the required methods of a plugin for inference. `inference_protocols` has the optional ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from torch import Tensor

from core_rl.backend.meta import FinetuneSpec, Scheduling
from core_rl.config.engine import InferenceEngineConfig
from core_rl.data.requests import LLMRequest, LLMResponse
from core_rl.distributed.devices import wants_cuda

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["InferenceBackend", "InferenceContext", "ModelLimits", "TopLogprobs"]

C = TypeVar("C", bound=InferenceEngineConfig)


@dataclass(frozen=True, kw_only=True)
class InferenceContext(Generic[C]):
    """Name and config of the engine that a backend is built for."""

    name: str
    """The name in the engine's spec, for messages."""
    config: C


@dataclass(frozen=True, kw_only=True)
class ModelLimits:
    """Limits of the served model; requests beyond them never reach the backend."""

    vocab_size: int
    """Token ids are below this."""
    context_length: int | None = None
    """The most tokens of prompt and response together; None for no limit."""
    image_model: PretrainedConfig | None = None
    """The config of a vision-language model whose images are computed; None for text alone."""

    @staticmethod
    def of(config: PretrainedConfig, vision: bool = False) -> ModelLimits:
        """The limits of a model of transformers, with or without its images."""
        text = config.get_text_config()
        return ModelLimits(
            vocab_size=text.vocab_size, context_length=_context(text), image_model=config if vision else None
        )


def _context(text: PretrainedConfig) -> int | None:
    """The tokens that the rotary scaling of ``text`` makes room for, as vLLM reads the same fields.

    ``max_position_embeddings`` is the length before ``linear`` and ``dynamic``, but not where layer types have
    scalings of their own (Gemma 3). With ``llama3`` and ``longrope`` it is the length after scaling, and ``yarn`` names
    the original.
    """
    limit: int | None = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None) or {}
    by_layer_type = [part for part in rope.values() if isinstance(part, dict)]
    for part in (by_layer_type or [rope]) if limit is not None else ():
        kind, factor = part.get("rope_type"), part.get("factor")
        if factor is not None and kind == "yarn":
            return int(factor * part["original_max_position_embeddings"])
        if factor is not None and kind in ("linear", "dynamic") and not by_layer_type:
            return int(factor * limit)
    return limit


@dataclass(frozen=True, kw_only=True)
class TopLogprobs:
    """The most likely tokens at each position, most likely first; zeros at first tokens."""

    ids: Tensor
    """Int64 ``[T, k]``."""
    logprobs: Tensor
    """Float32 ``[T, k]``."""


class InferenceBackend(ABC, Generic[C]):
    """A model that generates, in this process or on servers; constructed without arguments.

    `InferenceEngine` calls it in states and with arguments that it has checked. `agenerate` runs on the
    caller's event loop, of which there may be several; all other methods run in threads, and may block.
    """

    @abstractmethod
    def build(
        self, context: InferenceContext[C], addresses: tuple[str, ...], ft_spec: FinetuneSpec
    ) -> ModelLimits:
        """Load the model, or connect to the servers at ``addresses`` (``host:port``); returns the model's limits.

        Connected servers serve the weights of ``config.model`` afterwards, whatever they served before.
        Raises `ConfigError` for a model that cannot be served.
        """

    @abstractmethod
    async def agenerate(self, request: LLMRequest) -> LLMResponse:
        """Continue one prompt. Must not block the loop, and stops when it is cancelled.

        The response ends with the first of the model's end tokens, which `core_rl.checkpoint.end_tokens` reads, unless
        ``request.sampling.ignore_eos``, or of ``request.sampling.stop_token_ids``.

        Each token carries the version of the weights that drew it: that of the last finished
        `update_weights` or `set_version`, read once for each token and together with the weights.
        """

    @abstractmethod
    def set_version(self, version: int) -> None:
        """Tokens from now on carry ``version``; the weights are unchanged."""

    def teardown(self) -> None:
        """Free the model and stop launched servers, also after a failed `build`; no request is in flight any more.

        A weight update that has not ended within 10 s is still in flight, and fails: nothing waits for it.
        """

    def scheduling(self, config: C) -> Scheduling:
        """Resources that one server needs. May be called before `build`."""
        return Scheduling(gpu=config.layout.world_size // config.layout.dp * wants_cuda(config.device))
