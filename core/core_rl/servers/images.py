"""Images of requests, as servers of one kind read them."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from core_rl.data.media import GRID, PIXELS, Media
from core_rl.servers.wire import SentImages, Wire

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["ImageFields", "digest", "each_image"]

RECENT = 256
"""Encoded images that are kept, for the groups in flight."""


class ImageFields:
    """Fields of bodies with images for a model; requests that share images share their encoded form."""

    def __init__(self, wire: Wire, model: PretrainedConfig | None) -> None:
        self._wire, self._model = wire, model
        self._recent: OrderedDict[int, _Encoded] = OrderedDict()
        self.token: int | None = None if model is None else model.image_token_id
        """The placeholder, which no response holds."""

    def of(self, ids: Sequence[int], media: Media, *, scoring: bool = False) -> dict[str, Any]:
        """The fields for the prompt ``ids`` with ``media``, which fit each other; nothing without images."""
        if not media or self._model is None:  # the core refuses images for a model of text
            return {}
        images = SentImages(
            encoded=self._encoded(media),
            spans=_spans(ids, media, self._model),
            token=self._model.image_token_id,
        )
        return self._wire.image_fields(images, scoring=scoring)

    def _encoded(self, media: Media) -> Any:
        entry = self._recent.pop(id(media), None)
        # The entry holds the images, so that no others get their id.
        entry = entry or _Encoded(media, self._wire.encoded_images(media))
        self._recent[id(media)] = entry
        if len(self._recent) > RECENT:
            self._recent.popitem(last=False)
        return entry.form


@dataclass(frozen=True)
class _Encoded:
    media: Media
    form: Any


def each_image(media: Media) -> list[Media]:
    """The images of one sequence apart."""
    pixels = media[PIXELS].split(torch.prod(media[GRID], -1).tolist())
    return [{PIXELS: patches, GRID: grid[None]} for patches, grid in zip(pixels, media[GRID], strict=True)]


def digest(image: Media) -> str:
    """64 bits in hexadecimal; equal patches in another grid have another one."""
    hashed = hashlib.sha256()
    for name, value in sorted(image.items()):
        hashed.update(f"{name} {value.dtype} {list(value.shape)} ".encode())
        hashed.update(value.contiguous().view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()[:16]


def _spans(ids: Sequence[int], media: Media, model: PretrainedConfig) -> tuple[range, ...]:
    """The places of the placeholders of each image, which follow each other without a gap."""
    places = [place for place, token in enumerate(ids) if token == model.image_token_id]
    merged = int(model.vision_config.spatial_merge_size) ** 2
    ends = accumulate((torch.prod(media[GRID], -1) // merged).tolist(), initial=0)
    starts = list(ends)
    return tuple(
        range(places[first], places[last - 1] + 1)
        for first, last in zip(starts[:-1], starts[1:], strict=True)
    )
