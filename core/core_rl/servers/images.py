"""Images of requests, as the servers of one product read them."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from core_rl.data.media import Media
from core_rl.servers.wire import Wire

if TYPE_CHECKING:
    from transformers import PretrainedConfig

RECENT = 256
"""Encoded images that are kept, for the groups in flight."""


class ImageFields:
    """Fields of bodies with images for a model; requests that share images share their encoded form."""

    def __init__(self, wire: Wire, model: PretrainedConfig | None) -> None:
        self._wire = wire
        self._recent: OrderedDict[int, _Encoded] = OrderedDict()
        self.token: int | None = None if model is None else model.image_token_id
        """The placeholder, which no response holds."""

    def of(self, media: Media, *, scoring: bool = False) -> dict[str, Any]:
        """The fields for a prompt with ``media``; nothing without images."""
        if not media or self.token is None:  # the core refuses images for a model of text
            return {}
        return self._wire.image_fields(self._encoded(media), self.token, scoring=scoring)

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
