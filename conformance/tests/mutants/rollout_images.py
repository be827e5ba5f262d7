"""Images of requests: features that stay too long, and places that nobody counts."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace

from transformers import PreTrainedModel

from core_rl.backend.inference_backend import ModelLimits
from core_rl.backend.meta import FinetuneSpec
from core_rl.data.media import Media
from core_rl.data.requests import LLMRequest, LLMResponse
from core_rl.reference.rollout import ReferenceRolloutBackend
from mutants.images import QWEN
from mutants.zoo import Context, Mutant


@Mutant(
    "I7.rollout-images",
    "a prefix cache whose key has placeholders and no pixels",
    "generated after other images in the same places",
    family=QWEN,
)
class CachesImagesByTokens(ReferenceRolloutBackend):
    """A prompt with the tokens of an earlier one has its images."""

    def build(self, context: Context, addresses: tuple[str, ...], ft_spec: FinetuneSpec) -> ModelLimits:
        self._images: dict[tuple[int, ...], Media] = {}
        return super().build(context, addresses, ft_spec)

    def _complete(self, entries: Sequence[tuple[LLMRequest, Future[LLMResponse]]]) -> None:
        super()._complete(
            [
                (replace(request, media=self._images.setdefault(request.input_ids, request.media)), future)
                for request, future in entries
            ]
        )


@Mutant(
    "I12.receive-tower",
    "features of images that outlive an update: SGLang 0.5.23, flush_cache",
    "after the update",
    family=QWEN,
)
class UpdatesTheTextAlone(ReferenceRolloutBackend):
    """An update leaves the tower as it was."""

    def _adopt(self, model: PreTrainedModel) -> None:
        before: PreTrainedModel | None = getattr(self, "_model", None)
        if before is not None and hasattr(model.base_model, "visual"):
            model.base_model.visual = before.base_model.visual
        super()._adopt(model)


@Mutant(
    "contract.rollout-placeholders",
    "a server that dies of features without a place",
    "placeholders without an image",
    family=QWEN,
)
class CountsNoPlaceholders(ReferenceRolloutBackend):
    """The engine takes a vision-language model for a model of text."""

    def build(self, context: Context, addresses: tuple[str, ...], ft_spec: FinetuneSpec) -> ModelLimits:
        return replace(super().build(context, addresses, ft_spec), image_model=None)
