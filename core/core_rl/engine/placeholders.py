"""The images of a batch against the placeholders among its token ids, before a model or a server gets them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from core_rl.data.media import GRID, PIXELS, Media

if TYPE_CHECKING:
    from transformers import PretrainedConfig

VIDEO = "video"
"""Part of the names of arguments for videos."""


def placeholder_violations(
    rows: Iterable[Tensor], media: Sequence[Media], model: PretrainedConfig | None
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
    merged = getattr(model.vision_config, "spatial_merge_size", None)
    names = {PIXELS} if merged is None else {PIXELS, GRID}
    if unknown := sorted(media.keys() - names):
        if any(VIDEO in name for name in unknown):
            return f"the media have {', '.join(unknown)}; pass the frames of a video as images"
        return (
            f"the media have {', '.join(unknown)}, and images of the model type {model.model_type!r} are "
            f"{', '.join(sorted(names))}; leave out the rest"
        )
    pixels, grid = media.get(PIXELS), media.get(GRID)
    if pixels is None:
        return 0 if grid is None else f"{GRID!r} is there without {PIXELS!r}; pass both, or neither"
    if merged is None:
        return len(pixels) * int(getattr(model, "image_seq_length", None) or model.mm_tokens_per_image)
    return _features_of_patches(pixels, grid, int(merged))


def _features_of_patches(pixels: Tensor, grid: Tensor | None, merged: int) -> int | str:
    """The same for ``pixels [patches, size]``, of which ``merged ** 2`` are a feature."""
    if grid is None or grid.dim() != 2 or grid.shape[1] != 3:
        shape = "none" if grid is None else list(grid.shape)
        return f"{GRID!r} must be [images, 3] next to {PIXELS!r}; it is {shape}"
    patches = int(grid.prod(-1).sum())
    if patches != len(pixels):
        return f"{PIXELS!r} has {len(pixels)} patches, and {GRID!r} {grid.tolist()} is of {patches}"
    if bool((torch.remainder(grid[:, 1:], merged) != 0).any()):
        return f"{GRID!r} {grid.tolist()} has sides that {merged} does not divide"
    return patches // merged**2
