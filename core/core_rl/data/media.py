"""Images and videos of a sequence: the tensors that a processor made of them, by the model's argument names."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

Media = Mapping[str, Tensor]
"""Arguments of a vision-language model for one sequence, on the CPU: ``pixel_values`` and ``image_grid_thw``, their
video twins, or others. The first dimension of each runs over patches, images or videos, in the order of the
placeholders. Sequences with the same images share one object, which is sent and stored once."""

NO_MEDIA: Media = {}
"""Of a sequence of text; a dictionary, as batches are pickled, and a mapping proxy cannot be."""
PIXELS, GRID = "pixel_values", "image_grid_thw"
"""Arguments with the pixels of images, whose name begins those of videos as well, and with their sizes in patches."""
PATCH_PIXELS = 14 * 14
"""Pixels of one patch, where a processor leaves images whole (``[images, channels, height, width]``)."""


def media_violations(media: Sequence[Media], count: int) -> Iterable[str]:
    """Problems of the ``media`` of ``count`` sequences, each with the sequence and the argument."""
    if media and len(media) != count:
        yield f"'media' must have B={count} entries, or none; it has {len(media)}"
    entries: Sequence[Mapping[str, object]] = media  # a caller's types are not known
    for b, arguments in enumerate(entries):
        for name, value in arguments.items():
            place = f"media argument {name!r} of sequence {b}"
            if not isinstance(value, Tensor) or value.dim() < 1:
                kind = f"number {value.tolist()}" if isinstance(value, Tensor) else type(value).__name__
                yield f"{place} must be a tensor [N, ...]; it is a {kind}"
            elif name.startswith(PIXELS) and not value.numel():
                yield f"{place} has no pixels (shape {list(value.shape)}); leave the argument out"
            elif value.is_floating_point() and not bool(value.isfinite().all()):
                yield f"{place} holds NaN or infinity; look at the image and its processor"


def count_patches(media: Media) -> int:
    """Patches that a vision tower computes: rows of ``[patches, size]``, or pixels over 14 * 14."""
    return sum(_patches(value) for name, value in media.items() if name.startswith(PIXELS))


def _patches(pixels: Tensor) -> int:
    if pixels.dim() <= 2:
        return len(pixels)
    return math.prod(pixels.shape[:-3]) * -(-math.prod(pixels.shape[-2:]) // PATCH_PIXELS)


def join_media(media: Iterable[Media]) -> dict[str, Tensor]:
    """The arguments for all sequences in one pass: their tensors in order."""
    parts: dict[str, list[Tensor]] = {}
    for arguments in media:
        for name, value in arguments.items():
            parts.setdefault(name, []).append(value)
    return {name: torch.cat(values) for name, values in parts.items()}
