"""Images of packed sequences: positions, the order of images, and attention among their tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from core_rl.backend.steps import MicroBatchStep
from core_rl.config.capability import Capability
from core_rl.data.batch import SequenceBatch
from core_rl.data.media import join_media
from core_rl.data.outputs import ModelOutput
from core_rl.toolkit.build import build_model
from core_rl.toolkit.parallel_context import WHOLE, TokenSlice
from core_rl.toolkit.segments import Segments
from core_rl.toolkit.vision import PackedVision
from core_rl_conformance.profile import VISION as FAMILIES
from mutants.bases import Packed, Replicated, TrainContext, inside
from mutants.zoo import Mutant

VISION = frozenset({Capability.VISION})
QWEN, GEMMA = FAMILIES[0], "gemma3_vl"


class PackedByPositions(Replicated):
    """Sequences packed as transformers packs them: its attention takes their bounds from the row of text positions."""

    def build(self, context: TrainContext) -> None:
        model = build_model(context.config.model, seed=context.seed, attn_implementation="sdpa")
        self.vision = PackedVision(model)
        self.adopt(model, context)

    def outputs(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        tokens = WHOLE.slice_of(micro_batch)
        with self.vision.arguments(micro_batch, tokens) as arguments:
            logits = self.logits(tokens.input_ids, arguments) / step.temperature
        ids, lengths = micro_batch.input_ids, micro_batch.lengths
        parts = zip(ids.split(lengths), logits.split(lengths), strict=True)
        rows = [self.language_model(*part, step) for part in parts]
        return ModelOutput(**{name: torch.cat([row[name] for row in rows]) for name in rows[0]})

    def logits(self, ids: Tensor, arguments: dict[str, Any]) -> Tensor:
        """Logits ``[T, V]`` of packed ``ids``."""
        logits: Tensor = self.model(input_ids=ids[None], use_cache=False, **arguments).logits[0]
        return logits.float()


@Mutant("I6.images", "axolotl #3817", "log-probs of images in one pack", family=QWEN, declared=VISION)
class NoTextPositions(PackedByPositions):
    """Positions in time, height and width go without the row of text positions: ``[3, 1, T]``."""

    def logits(self, ids: Tensor, arguments: dict[str, Any]) -> Tensor:
        positions = arguments["position_ids"]
        return super().logits(ids, {**arguments, "position_ids": positions[-3:]})


@Mutant("I6.images", "Megatron-Bridge #1776", "log-probs of images in one pack", family=QWEN, declared=VISION)
class PositionsOfWholePack(PackedByPositions):
    """The model counts positions, which it does over the pack."""

    def logits(self, ids: Tensor, arguments: dict[str, Any]) -> Tensor:
        kinds = (ids == self.model.config.image_token_id).int()[None]
        return super().logits(ids, {**arguments, "position_ids": None, "mm_token_type_ids": kinds})


@Mutant(
    "I6.images",
    "bounds of sequences that transformers finds by positions without a cache alone",
    "log-probs of images in one pack",
    family=QWEN,
    declared=VISION,
)
class CacheLeftOn(PackedByPositions):
    """``use_cache`` stays at its default, and with a cache transformers looks for no packed sequences."""

    def logits(self, ids: Tensor, arguments: dict[str, Any]) -> Tensor:
        logits: Tensor = self.model(input_ids=ids[None], **arguments).logits[0]
        return logits.float()


class _Bent(Packed):
    """Images are passed on otherwise."""

    vision: type[PackedVision]

    def build(self, context: TrainContext) -> None:
        super().build(context)
        self.packed.vision = self.vision(self.model)

    def verify(self) -> None:
        """Without the toolkit's probe, which has no images."""


@Mutant("I6.images", "Automodel #2172", "log-probs of images in one pack", family=QWEN, declared=VISION)
@inside(_Bent, "vision")
class ImagesHaveTextPositions(PackedVision):
    """Placeholders are counted one by one, as text is."""

    @contextmanager
    def arguments(self, batch: SequenceBatch, tokens: TokenSlice) -> Iterator[dict[str, Any]]:
        with super().arguments(batch, tokens) as arguments:
            yield {**arguments, "position_ids": tokens.position_ids[None]}


@Mutant(
    "I6.images",
    "positions of a batch that are computed for its images alone",
    "log-probs of images in one pack",
    family=QWEN,
    declared=VISION,
)
@inside(_Bent, "vision")
class TextHasPositionsOfImageBefore(PackedVision):
    """A text gets the positions of the sequence with an image before it."""

    @contextmanager
    def arguments(self, batch: SequenceBatch, tokens: TokenSlice) -> Iterator[dict[str, Any]]:
        with super().arguments(batch, tokens) as arguments:
            if not batch.media:
                yield arguments
                return
            rows = list(arguments["position_ids"].split(batch.lengths, dim=-1))
            for number in range(1, len(rows)):
                before, length = rows[number - 1], batch.lengths[number]
                if not batch.media[number] and length <= batch.lengths[number - 1]:
                    rows[number] = torch.cat([rows[number][:1], before[1:, :, :length]])
            yield {**arguments, "position_ids": torch.cat(rows, dim=-1)}


@Mutant(
    "I6.images",
    "images that are joined in another order than their sequences",
    "log-probs of images in one pack",
    family=QWEN,
    declared=VISION,
)
@inside(_Bent, "vision")
class ImagesInOppositeOrder(PackedVision):
    """Images of the last sequence come first."""

    @contextmanager
    def arguments(self, batch: SequenceBatch, tokens: TokenSlice) -> Iterator[dict[str, Any]]:
        with super().arguments(batch, tokens) as arguments:
            yield {**arguments, **join_media(reversed(batch.media))}


@Mutant(
    "I6.images",
    "masks for packed sequences that replace those of the model",
    "log-probs of images in one pack",
    family=GEMMA,
    declared=VISION,
)
@inside(_Bent, "vision")
class ImagesAreCausal(PackedVision):
    """Tokens of an image see no later tokens of it."""

    def attention(self, segments: Segments, batch: SequenceBatch) -> Segments:
        return segments
