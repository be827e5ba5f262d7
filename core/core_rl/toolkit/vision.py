"""Images of packed batches: arguments of a vision-language model of transformers, and the positions of its tokens.

The tower runs on the images of a whole micro-batch, and its features replace the placeholders among the tokens. Each
micro-batch runs it once, on a blank image where it has none: wrappers that gather weights in the pass (FSDP) wait for
all of their ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from core_rl.data.batch import SequenceBatch
from core_rl.data.media import GRID, PIXELS, Media, join_media
from core_rl.data.pinned import to_device
from core_rl.errors import ConfigError, UnsupportedCapability
from core_rl.toolkit.parallel_context import TokenSlice
from core_rl.toolkit.segments import Blocks, Segments

MODEL_TYPES = ("gemma3", "internvl", "qwen2_5_vl", "qwen3_5", "qwen3_vl", "qwen3_vl_moe")
"""Families whose packed images the conformance suite compares with transformers; others attend in other ways."""


def has_tower(config: PretrainedConfig) -> bool:
    """Whether a model with ``config`` has a vision tower."""
    return getattr(config, "vision_config", None) is not None


def check_vision(config: PretrainedConfig) -> None:
    """Raise for a model with ``config`` whose images cannot be computed right in packed batches.

    `ConfigError` without a vision tower, and `UnsupportedCapability` for a family that was not compared with
    transformers.
    """
    if not has_tower(config):
        raise ConfigError(
            f"model.vision is true, and the model type {config.model_type!r} has no vision tower; set it to false"
        )
    if config.model_type not in MODEL_TYPES:
        raise UnsupportedCapability(
            f"the model type {config.model_type!r} is not among the vision-language models that are trained with "
            f"images: {', '.join(MODEL_TYPES)}; choose a model of these"
        )


def sequence_arguments(trunk: nn.Module, ids: Tensor, media: Media) -> dict[str, Tensor]:
    """Arguments of ``trunk`` for rows ``[B, L]`` with the images of all, besides ids; the model computes positions."""
    if not media:
        return {}
    arguments = {name: to_device(value, ids.device) for name, value in media.items()}
    accepted = signature(type(trunk).forward).parameters
    kinds = _token_kinds(cast("PretrainedConfig", trunk.config), ids)
    return arguments | {name: kinds for name in ("mm_token_type_ids", "token_type_ids") if name in accepted}


def _token_kinds(config: PretrainedConfig, ids: Tensor) -> Tensor:
    """1 for placeholders of images, 0 for text, and for placeholders of videos, which no batch has: int64."""
    kinds: Tensor = (ids == config.image_token_id).long()
    return kinds


def blank_image(config: PretrainedConfig) -> Media:
    """The smallest black image that the tower of ``config`` takes."""
    vision = config.vision_config
    channels = int(getattr(vision, "in_channels", 0) or getattr(vision, "num_channels", 3))
    if hasattr(vision, "spatial_merge_size"):
        side = vision.spatial_merge_size
        size = channels * vision.temporal_patch_size * vision.patch_size**2
        return {PIXELS: torch.zeros(side**2, size), GRID: torch.tensor([[1, side, side]])}
    size = vision.image_size
    height, width = (size, size) if isinstance(size, int) else size
    return {PIXELS: torch.zeros(1, channels, height, width)}


@dataclass(frozen=True)
class ImageFeatures:
    """Features of images for the tokens of this rank, in the order of these."""

    places: Tensor
    """Places of their placeholders in the slice: int64 ``[N]``, on the device."""
    hidden: Tensor
    """``[N, H]``, in the place of embeddings."""
    levels: tuple[Tensor, ...]
    """``[N, H]`` for each of the first layers of the text, added to its output."""


class PackedVision:
    """Computes the images of packed batches in ``model``, or in a trunk."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._trunk = model.base_model
        self._config = model.config
        self._blank = blank_image(model.config)
        # The tokens of an image see each other in both directions (Gemma 3).
        self._sees_images_whole = "token_type_ids" in signature(type(self._trunk).forward).parameters
        self._has_grid_positions = hasattr(self._trunk, "get_rope_index")

    @contextmanager
    def arguments(self, batch: SequenceBatch, tokens: TokenSlice) -> Iterator[dict[str, Any]]:
        """Arguments of the trunk for ``tokens``, besides its ids, to be used inside the context."""
        images, rows, _ = self._images(batch, tokens)
        with _some_features(self._trunk, rows):
            yield {**images, "position_ids": self.positions(batch, tokens)}

    def features(self, batch: SequenceBatch, tokens: TokenSlice) -> ImageFeatures:
        """Run the tower, for an engine with a text model of its own."""
        images, rows, places = self._images(batch, tokens)
        with _some_features(self._trunk, rows):
            output = self._trunk.get_image_features(**images, return_dict=True)  # type: ignore[operator]
        levels = getattr(output, "deepstack_features", None) or ()
        return ImageFeatures(
            to_device(places, batch.device), _whole(output.pooler_output), tuple(map(_whole, levels))
        )

    def _images(
        self, batch: SequenceBatch, tokens: TokenSlice
    ) -> tuple[dict[str, Tensor], Tensor | None, Tensor]:
        """Arguments of the tower, the rows of its features that belong here (None for all), and where they go."""
        media = join_media(batch.media)
        placeholders = (batch.original.input_ids == self._config.image_token_id).nonzero().squeeze(1)
        here, places = tokens.here(placeholders)
        rows = None if media and len(here) == len(placeholders) else here
        images = {name: to_device(value, batch.device) for name, value in (media or self._blank).items()}
        return images, rows, places

    def attention(self, segments: Segments, batch: SequenceBatch) -> Segments:
        """``segments`` of ``batch`` with its images, where their tokens see each other in both directions."""
        if not (self._sees_images_whole and batch.media):
            return segments
        padding = len(segments.lengths) - batch.num_sequences
        rows = batch.original.input_ids.split(batch.lengths)
        blocks = (*map(self._image_stretches, rows), *((),) * padding)
        return Segments(segments.bounds, segments.context, segments.tensor, segments.paths, blocks)

    def _image_stretches(self, ids: Tensor) -> Blocks:
        """Stretches of placeholders among the ids of one sequence."""
        edges = F.pad((ids == self._config.image_token_id).int(), (1, 1)).diff().nonzero().squeeze(1).tolist()
        return tuple(zip(edges[::2], edges[1::2], strict=True))

    def positions(self, batch: SequenceBatch, tokens: TokenSlice) -> Tensor:
        """``[1, L]``, or positions in the text, in time, in height and in width, ``[4, 1, L]``."""
        if not self._has_grid_positions or not batch.media:
            return tokens.position_ids[None]
        rows = batch.original.input_ids.split(batch.lengths)
        grids = [self._grid_positions(ids, media) for ids, media in zip(rows, batch.media, strict=True)]
        positions = to_device(tokens.part_of(torch.cat(grids, dim=1)), batch.device)
        return torch.cat([tokens.position_ids[None], positions])[:, None]

    def _grid_positions(self, ids: Tensor, media: Media) -> Tensor:
        """Positions of one sequence in time, height and width, by the model's own rule: int64 ``[3, L]``."""
        if not media:
            return torch.arange(len(ids)).expand(3, -1)
        grids = {name: value for name, value in media.items() if not name.startswith(PIXELS)}
        kinds = _token_kinds(self._config, ids)
        positions: Tensor = self._trunk.get_rope_index(ids[None], mm_token_type_ids=kinds[None], **grids)[0]  # type: ignore[operator]
        return positions[:, 0]


@contextmanager
def _some_features(trunk: nn.Module, rows: Tensor | None) -> Iterator[None]:
    """Let ``get_image_features`` of ``trunk`` give these ``rows`` of its features alone; None for all.

    A rank with a part of the tokens computes the whole tower, as ranks that hold its weights together have to.
    """
    if rows is None:
        yield
        return
    compute = trunk.get_image_features

    def selected(*arguments: Any, **options: Any) -> Any:
        features = compute(*arguments, **options)  # type: ignore[operator]
        features.pooler_output = _selected(features.pooler_output, rows)
        if levels := getattr(features, "deepstack_features", None):
            features.deepstack_features = [_selected(level, rows) for level in levels]
        return features

    trunk.get_image_features = selected  # type: ignore[assignment]
    try:
        yield
    finally:
        del trunk.get_image_features


def _selected(features: Tensor | tuple[Tensor, ...], rows: Tensor) -> Tensor | tuple[Tensor, ...]:
    """Rows of features, which may be whole or a tuple with a tensor for each image."""
    joined = _whole(features)
    picked = joined.index_select(0, to_device(rows, joined.device))
    return picked if isinstance(features, Tensor) else (picked,)


def _whole(features: Tensor | tuple[Tensor, ...]) -> Tensor:
    """Features of all images, ``[N, H]``."""
    joined = features if isinstance(features, Tensor) else torch.cat(tuple(features))
    return joined.flatten(0, -2)
