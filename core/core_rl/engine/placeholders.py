"""The images of a batch against the placeholders among its token ids, before a model or a server gets them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from core_rl.data.media import Media

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["placeholder_violations"]


def placeholder_violations(
    rows: Sequence[Tensor], media: Sequence[Media], model: PretrainedConfig | None
) -> Iterator[str]:
    """Sequences whose placeholders are not as many as the features of their images.

    Args:
        rows: the token ids of each sequence.
        media: the images of each sequence, or nothing where no sequence has some.
        model: the config of the vision-language model; None for an engine that computes text alone.
    """
    if model is None:
        pictured = next((b for b, arguments in enumerate(media) if arguments), None)
        if pictured is not None:
            yield (
                f"sequence {pictured} has images, and this engine computes text alone; set model.vision to true, with "
                "a vision-language model"
            )
        return
    for index, ids in enumerate(rows):
        arguments = media[index] if media else {}
        placed = int((ids == model.image_token_id).sum())
        features = _features(arguments, model)
        if isinstance(features, str):
            yield f"sequence {index}: {features}"
        elif placed != features:
            yield (
                f"sequence {index} has {placed} placeholders (token {model.image_token_id}) for {features} features of "
                "its images; take ids and images from one call of the processor"
            )


def _features(media: Media, model: PretrainedConfig) -> int | str:
    """The features that the tower gives for ``media``, or the problem of these."""
    if videos := sorted(name for name in media if "video" in name):
        return f"{', '.join(videos)}: no engine computes videos; pass their frames as images"
    pixels = media.get("pixel_values")
    if pixels is None:
        return 0
    if hasattr(model.vision_config, "spatial_merge_size"):
        return _grid_features(
            pixels, media.get("image_grid_thw"), int(model.vision_config.spatial_merge_size)
        )
    each = getattr(model, "image_seq_length", None) or model.mm_tokens_per_image
    return len(pixels) * int(each)


def _grid_features(pixels: Tensor, grid: Tensor | None, merged: int) -> int | str:
    """The same of images that are cut into patches, of which squares of ``merged`` by ``merged`` make a feature."""
    if grid is None or grid.dim() != 2 or grid.shape[1] != 3:
        shape = "none" if grid is None else list(grid.shape)
        return f"'image_grid_thw' must be [images, 3] next to 'pixel_values'; it is {shape}"
    patches = int(grid.prod(-1).sum())
    if patches != len(pixels):
        return (
            f"'pixel_values' has {len(pixels)} patches, and 'image_grid_thw' {grid.tolist()} is of {patches}"
        )
    if bool((torch.remainder(grid[:, 1:], merged) != 0).any()):
        return f"'image_grid_thw' {grid.tolist()} has sides that {merged} does not divide"
    return patches // merged**2
