"""Images of examples: turned into arguments of the model, and counted among the tokens of each sequence."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from core_rl.config.engine import ModelConfig
from core_rl.data.media import GRID, NO_MEDIA, PIXELS, join_media
from core_rl.errors import BatchError, ConfigError, raise_all
from core_rl_trainer.data.chat_template import ChatFormat
from core_rl_trainer.data.encoding import Encoded
from core_rl_trainer.data.examples import Example
from core_rl_trainer.data.image_fields import (
    CHATS,
    COLUMNS,
    PLACE,
    all_texts,
    image_parts,
    is_file,
    is_image,
    is_pictured,
    with_content,
)
from core_rl_trainer.data.image_files import ImageName, read_image
from core_rl_trainer.data.kinds import IMAGES, ExampleKind, Sample, images_of
from core_rl_trainer.data.plain import MEDIA, shown

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from core_rl.data.media import Media

ANY_PLACE = re.compile(r"<\|?(image|img|picture)[^<>]{0,12}>", re.IGNORECASE)
"""Places of images, also as other systems write them."""
TAGGED = re.compile(r"<img>([^<>\n]+)</img>")
"""The path of an image in a text, as of Qwen-VL."""
SIZES = {
    "patch_size": "patch_size",
    "merge_size": "spatial_merge_size",
    "temporal_patch_size": "temporal_patch_size",
}
"""Fields of an image processor, and the equal fields of the vision tower."""


def images_digest(samples: Iterable[Sample]) -> str | None:
    """The sha256 of all image files of ``samples``, by their bytes; None without files."""
    total, digests = hashlib.sha256(), dict[str, bytes]()
    for image in (image for sample in samples for image in images_of(sample)):
        if isinstance(image, ImageName) and image.content is None:
            if image not in digests:
                digests[image] = hashlib.sha256(Path(image).read_bytes()).digest()
            total.update(digests[image])
    return total.hexdigest() if digests else None


def without_images(kind: ExampleKind) -> ExampleKind:
    """``kind`` for a model of text alone: an example with images is refused."""

    def check(example: Example) -> str | None:
        texts = "".join(all_texts([example.get(name) for name in CHATS if name != "answer"]))
        columns = [name for name in COLUMNS if example.get(name)]
        pictured = [name for name in columns if PLACE in texts or is_pictured(example[name])]
        if pictured or any(True for name in CHATS for _ in image_parts(example.get(name))):
            return (
                f"has {repr(pictured[0]) if pictured else 'images in its messages'}, and the model is trained on text "
                "alone; set model.vision=true, with a vision-language model, or remove the images"
            )
        return kind.check(example)

    return replace(kind, check=check)


def with_images(kind: ExampleKind, encoder: ImageEncoder) -> ExampleKind:
    """``kind``, whose examples may have images."""

    def check(example: Example) -> str | None:
        try:
            marked, images = encoder.marked(kind, example)
        except BatchError as error:
            return str(error)
        unused = [name for name in example.keys() - {*CHATS, "text"} if is_file(example[name])]
        if unused and not images:
            return (
                f"has no image, and one in the column {unused[0]!r}, which is not read; write "
                f"data.columns.images={unused[0]}, or remove the column"
            )
        return kind.check(marked)

    def encode(chat_format: ChatFormat, example: Example) -> Sample:
        marked, images = encoder.marked(kind, example)
        sample = kind.encode(chat_format, marked)
        if not images:
            return sample
        texts = {"prompt": example["prompt"]} if "prompt" in sample else {}
        return {**encoder.expanded(sample, images, whole="messages" not in marked), **texts}

    return replace(kind, check=check, encode=encode)


@dataclass(frozen=True, kw_only=True, eq=False)
class ImageEncoder:
    """The image processor of a model directory, and the tokens of the model that stand for images."""

    processor: Any
    config: PretrainedConfig
    marker: str
    """The text of one image in a prompt, before its placeholder is repeated for each feature."""
    placeholder: str
    """The text of the token that is repeated."""
    most_pixels: int
    """Larger images are refused."""
    media: dict[tuple[str | bytes, ...], Media] = field(default_factory=dict)
    """Arguments of the model by images, so that sequences with the same images share one object."""

    @staticmethod
    def of(path: str, tokenizer: PreTrainedTokenizerBase, most_pixels: int) -> ImageEncoder:
        """That of the model in ``path``.

        Raises `ConfigError` for a model without an image processor, for a processor of another model, and for a family
        whose placeholders are not known.
        """
        from transformers import AutoImageProcessor

        from core_rl.checkpoint.model_config import cause_of, read_config

        config = read_config(ModelConfig(path=path))
        names = ("vision_start_token_id", "image_token_id", "vision_end_token_id")
        ids = [int(number) for name in names if (number := getattr(config, name, None)) is not None]
        if len(ids) < len(names) or not hasattr(getattr(config, "vision_config", None), "spatial_merge_size"):
            raise ConfigError(
                f"model.vision: the placeholders of images of the model type {config.model_type!r} are not known to "
                "the trainer; take a model of Qwen2.5-VL, Qwen3-VL or Qwen3.5"
            )
        try:
            processor = AutoImageProcessor.from_pretrained(path, local_files_only=True)
            processor(images=[np.zeros((64, 64, 3), np.uint8)], return_tensors="pt")
        except (ImportError, OSError, RuntimeError, TypeError, ValueError) as error:
            raise ConfigError(
                f"model.path = {path!r} has no image processor that works: {cause_of(error)}; copy "
                "preprocessor_config.json of the model that it was trained from into this directory, and install pillow"
            ) from error
        sizes = [(name, getattr(processor, name, None), other) for name, other in SIZES.items()]
        problems = [
            f"{name} = {size}, and the model has vision_config.{other} = {expected}; copy this file from the "
            "model that it was trained from"
            for name, size, other in sizes
            if size != (expected := getattr(config.vision_config, other))
        ]
        if GRID not in processor.model_input_names:
            problems = [
                f"{type(processor).__name__} gives no {GRID!r}, which the model takes; copy this file of that model"
            ]
        raise_all(ConfigError, f"model.path = {path!r}: preprocessor_config.json", problems)
        tokens = list(map(str, tokenizer.convert_ids_to_tokens(ids)))
        return ImageEncoder(
            processor=processor,
            config=config,
            marker="".join(tokens),
            placeholder=tokens[1],
            most_pixels=most_pixels,
        )

    def marked(self, kind: ExampleKind, example: Example) -> tuple[Example, list[ImageName]]:
        """``example`` with the marker in the place of each image, and its images in the order of their places.

        Raises `BatchError` where there are not as many places as images, or some in a text that the model writes.
        """
        images = example.get(IMAGES) or []
        prompts, completions = _fields(kind, example)
        fields = {name: example[name] for name in prompts if example.get(name) is not None}
        if images and not ANY_PLACE.search(
            "\n".join(all_texts([*fields.values()])).replace(self.marker, PLACE)
        ):
            fields = {name: _with_places(value, len(images)) for name, value in fields.items()}
        places = _Places(self.marker, images)
        changed = {name: places.marked(value) for name, value in fields.items()}
        texts = "\n".join(all_texts([*changed.values(), *(example.get(name) for name in completions)]))
        if tagged := TAGGED.search(texts):
            raise BatchError(
                f"has the path {shown(tagged[1])} of an image in a text, which is not read; write {PLACE!r} there, "
                "and the path in 'images'"
            )
        if PLACE in texts:
            raise BatchError(
                f"has an image, or {PLACE!r}, in a text that the model writes; move it into a prompt or a turn of the "
                "user, or write the text in another way"
            )
        if texts.count(self.placeholder) != places.count:
            raise BatchError(
                f"has a text that spells the placeholder {self.placeholder!r}; write {PLACE!r} for an image, or remove "
                "it"
            )
        if len(places.images) != places.count:
            fix = "" if places.images else ", name the column of images with data.columns.images=COLUMN"
            raise BatchError(
                f"has {len(places.images)} images and {places.count} places for them; write {PLACE!r} in a text, or "
                f"{{'type': 'image'}} in a message, where each belongs{fix}, or write {PLACE!r} in another way where "
                "no image is meant"
            )
        return {**example, **changed}, places.images

    def expanded(self, sample: Sample, images: Sequence[ImageName], *, whole: bool) -> Sample:
        """``sample`` with a placeholder for each feature of each image, and with the images of each sequence.

        These are the images up to its end; with ``whole``, each sequence has all.
        """
        merged = int(self.config.vision_config.spatial_merge_size) ** 2
        media: list[Media] = []

        def grown(encoded: Encoded) -> Encoded:
            places = encoded[0].count(int(self.config.image_token_id))
            if places > len(images) or (whole and places < len(images)):
                raise BatchError(
                    f"has {places} placeholders of images among its tokens, and {len(images)} images; let the chat "
                    "template keep all messages as they are"
                )
            media.append(self._arguments(images[:places]) if places else NO_MEDIA)
            counts = (media[-1][GRID].prod(-1) // merged).tolist() if places else []
            return _repeated(encoded, int(self.config.image_token_id), counts)

        changed: dict[str, Any]
        if "prompt_ids" in sample:  # next to columns of any name
            ids = list(sample["prompt_ids"])
            changed = {"prompt_ids": grown((ids, [False] * len(ids)))[0]}
        elif "sequences" in sample:
            changed = {"sequences": [grown(sequence) for sequence in sample["sequences"]]}
        else:
            changed = {name: grown(sample[name]) for name in ("chosen", "rejected")}
        seen = max((len(arguments[GRID]) for arguments in media if arguments), default=0)
        for image in images[seen:]:  # behind the last trained turn
            self._features(image)
        return {**sample, **changed, MEDIA: media, IMAGES: list(images)}

    def _arguments(self, images: Sequence[ImageName]) -> Media:
        """Arguments of the model for ``images``. Raises `BatchError` about an image."""
        key = tuple(image.source for image in images)
        if key not in self.media:
            self.media[key] = join_media([self._features(image) for image in images])
        return self.media[key]

    def _features(self, image: ImageName) -> Media:
        try:
            return _processed(self, image.source)
        except BatchError as error:
            raise BatchError(f"has an {image.place} that {error}") from error


@lru_cache(maxsize=64)
def _processed(encoder: ImageEncoder, source: str | bytes) -> Media:
    picture = read_image(source, encoder.most_pixels)
    try:
        features = encoder.processor(images=[picture], return_tensors="pt")
    except (RuntimeError, TypeError, ValueError) as error:
        raise BatchError(
            f"has {picture.width} x {picture.height} pixels, which the model's image processor refuses: {error}; scale "
            "or crop it"
        ) from error
    return {name: features[name] for name in (PIXELS, GRID)}


def _fields(kind: ExampleKind, example: Example) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The fields of ``example`` that may have images, and fields with texts that the model writes."""
    if kind.name == "demonstrations" and example.get("messages") is not None:
        return ("messages",), ()
    if kind.name == "demonstrations" and example.get("prompt") is None:
        return (), ("text",)
    return ("prompt",), kind.fields[1:]


def _repeated(encoded: Encoded, placeholder: int, counts: Sequence[int]) -> Encoded:
    ids, mask = encoded
    repeats: Iterator[int] = iter(counts)
    times = [next(repeats) if token == placeholder else 1 for token in ids]
    return (
        [token for token, count in zip(ids, times, strict=True) for _ in range(count)],
        [trained for trained, count in zip(mask, times, strict=True) for _ in range(count)],
    )


def _with_places(value: Any, count: int) -> Any:
    """A text, or messages, with ``count`` places before the text of the user, as TRL has them.

    Several images in a chat of several turns have no such place.
    """
    if isinstance(value, str):
        return PLACE * count + value
    users = [number for number, message in enumerate(value) if message.get("role") == "user"]
    if not users or (len(users) > 1 and count > 1):
        return value
    first, turn = users[0], value[users[0]]
    places = PLACE * count if isinstance(turn["content"], str) else [{"type": "image"}] * count
    return [*value[:first], {**turn, "content": places + turn["content"]}, *value[first + 1 :]]


class _Places:
    """Replaces the places of images by ``marker``, and collects all images in the order of their places."""

    def __init__(self, marker: str, column: list[ImageName]) -> None:
        self._marker = marker
        self._column = column
        self._taken = 0
        self._placed: list[ImageName] = []
        self.count = 0

    @property
    def images(self) -> list[ImageName]:
        """Images with a place, and the rest of the column."""
        return self._placed + self._column[self._taken :]

    def marked(self, value: Any) -> Any:
        """A text, or messages, with markers; values of another form stay as they are."""
        if isinstance(value, str):
            return self._text(value)
        if not isinstance(value, list):
            return value
        return [
            message
            if isinstance(message, Mapping) and message.get("role") == "assistant"
            else with_content(message, self._part, self._text)
            for message in value
        ]

    def _part(self, part: Any) -> Any:
        if isinstance(part, Mapping) and isinstance(part.get("text"), str):
            return {**part, "text": self._text(part["text"])}
        if not is_image(part):
            return part
        if part.get("image") is None:
            if part.get("index") not in (None, self._taken):
                raise BatchError(
                    f"has an image part with index = {part['index']!r}, and image {self._taken} of the column is next; "
                    "write the images in the order of their places"
                )
            return {"type": "text", "text": self._text(PLACE)}
        self.count += 1
        self._placed.append(part["image"])
        return {"type": "text", "text": self._marker}

    def _text(self, text: str) -> str:
        text = text.replace(self._marker, PLACE)
        places = text.count(PLACE)
        self.count += places
        self._placed += self._column[self._taken : self._taken + places]
        self._taken = min(self._taken + places, len(self._column))
        return text.replace(PLACE, self._marker)
