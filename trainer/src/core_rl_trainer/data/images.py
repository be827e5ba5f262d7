"""Images of examples: read, checked, turned into arguments of the model, and counted among the tokens of a prompt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core_rl.config.engine import ModelConfig
from core_rl.data.media import GRID, PIXELS
from core_rl.errors import BatchError, ConfigError
from core_rl_trainer.data.chat import Encoded
from core_rl_trainer.data.chat_template import ChatFormat
from core_rl_trainer.data.examples import Example, Examples
from core_rl_trainer.data.kinds import MEDIA, ExampleKind, Sample

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from core_rl.data.media import Media

__all__ = ["IMAGES", "ImageEncoder", "located", "with_images", "without_images"]

IMAGES = "images"
"""The field of an example with the paths of its images."""
PLACE = "<image>"
"""The place of an image in a text."""
TEXTS = ("prompt", "messages")
"""Fields of examples in which images may stand."""


def located(examples: Examples, directory: Path) -> Examples:
    """``examples`` whose images have paths that are relative to ``directory``."""

    def placed(value: Any) -> Any:
        """A path, paths, or messages, with paths that are found from anywhere."""
        if isinstance(value, str):
            return str(directory / value)
        if isinstance(value, list):
            return [placed(entry) for entry in value]
        return value

    def placed_messages(value: Any) -> Any:
        if isinstance(value, list):
            return [placed_messages(entry) for entry in value]
        if not isinstance(value, Mapping):
            return value
        if _is_image(value) and "image" in value:
            return {**value, "image": placed(value["image"])}
        if isinstance(value.get("content"), list):
            return {**value, "content": placed_messages(value["content"])}
        return value

    def read(index: int) -> Example:
        example = examples[index]
        changed = {name: placed_messages(example[name]) for name in TEXTS if name in example}
        return {**example, **changed, **({IMAGES: placed(example[IMAGES])} if example.get(IMAGES) else {})}

    return replace(examples, read=read)


def without_images(kind: ExampleKind) -> ExampleKind:
    """``kind`` for a model of text alone: an example with images is refused."""

    def check(example: Example) -> str | None:
        if example.get(IMAGES):
            return (
                f"has {IMAGES!r}, and the model is trained on text alone; set model.vision=true, with a "
                "vision-language model, or remove the column"
            )
        return kind.check(example)

    return replace(kind, check=check)


def with_images(kind: ExampleKind, encoder: ImageEncoder) -> ExampleKind:
    """``kind``, whose examples may have images."""

    def encode(chat_format: ChatFormat, example: Example) -> Sample:
        marked = encoder.marked(example)
        media = encoder.media(marked.get(IMAGES) or ())
        sample = kind.encode(chat_format, marked)
        return {**encoder.expanded(sample, media), MEDIA: media, IMAGES: marked[IMAGES]} if media else sample

    return replace(kind, check=lambda example: kind.check(encoder.marked(example)), encode=encode)


@dataclass(frozen=True, kw_only=True, eq=False)
class ImageEncoder:
    """The image processor of a model directory, and the tokens of the model that stand for images."""

    processor: Any
    config: PretrainedConfig
    marker: str
    """The text of one image in a prompt, before its placeholder is repeated for each feature."""
    most_pixels: int
    """Larger images are refused."""

    @staticmethod
    def of(path: str, tokenizer: PreTrainedTokenizerBase, most_pixels: int) -> ImageEncoder:
        """That of the model in ``path``.

        Raises `ConfigError` for a model without an image processor, and for a family whose placeholders are not known.
        """
        from transformers import AutoImageProcessor

        from core_rl.toolkit.build import read_config

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
        except (OSError, ValueError, ImportError) as error:
            raise ConfigError(
                f"model.path = {path!r} has no image processor: {error}; copy preprocessor_config.json of the model "
                "that it was trained from into this directory, and install pillow"
            ) from error
        marker = "".join(map(str, tokenizer.convert_ids_to_tokens(ids)))
        return ImageEncoder(processor=processor, config=config, marker=marker, most_pixels=most_pixels)

    def marked(self, example: Example) -> Example:
        """``example`` with the marker in the place of each image, and the paths of all in the field ``images``.

        Raises `BatchError` where there are not as many places as images.
        """
        paths = example.get(IMAGES)
        if isinstance(paths, str):
            paths = [paths]
        if paths is not None and not (
            isinstance(paths, list) and all(isinstance(path, str) for path in paths)
        ):
            raise BatchError(f"has {IMAGES!r} that are no list of paths: {paths!r}")
        places = _Places(self.marker, list(paths or ()))
        marked = {name: places.marked(example[name]) for name in TEXTS if example.get(name) is not None}
        if len(places.paths) != places.count:
            raise BatchError(
                f"has {len(places.paths)} images and {places.count} places for them; write {PLACE!r} in a text, or "
                f"{{'type': 'image'}} in a message, where each belongs"
            )
        return {**example, **marked, **({IMAGES: places.paths} if places.paths else {})}

    def media(self, paths: Sequence[str]) -> Media:
        """Arguments of the model for the images at ``paths``; equal paths give the same object."""
        return _processed(self, tuple(paths)) if paths else {}

    def expanded(self, sample: Sample, media: Media) -> Sample:
        """``sample`` with a placeholder for each feature of each image."""
        merged = int(self.config.vision_config.spatial_merge_size) ** 2
        counts = (media[GRID].prod(-1) // merged).tolist()

        def grown(encoded: Encoded) -> Encoded:
            return _repeated(encoded, int(self.config.image_token_id), counts)

        changed: dict[str, Any] = {}
        if "prompt_ids" in sample:
            ids = list(sample["prompt_ids"])
            changed["prompt_ids"] = grown((ids, [False] * len(ids)))[0]
        if "sequences" in sample:
            changed["sequences"] = [grown(sequence) for sequence in sample["sequences"]]
        changed |= {name: grown(sample[name]) for name in ("chosen", "rejected") if name in sample}
        return {**sample, **changed}


def _repeated(encoded: Encoded, placeholder: int, counts: Sequence[int]) -> Encoded:
    ids, mask = encoded
    if ids.count(placeholder) != len(counts):
        raise BatchError(
            f"has {ids.count(placeholder)} placeholders of images among its tokens, and {len(counts)} images; remove "
            "texts that spell a placeholder, and let the chat template keep all messages"
        )
    repeats: Iterator[int] = iter(counts)
    times = [next(repeats) if token == placeholder else 1 for token in ids]
    return (
        [token for token, count in zip(ids, times, strict=True) for _ in range(count)],
        [trained for trained, count in zip(mask, times, strict=True) for _ in range(count)],
    )


@lru_cache(maxsize=4096)
def _processed(encoder: ImageEncoder, paths: tuple[str, ...]) -> Media:
    images = [_opened(number, path, encoder.most_pixels) for number, path in enumerate(paths, 1)]
    features = encoder.processor(images=images, return_tensors="pt")
    return {name: features[name] for name in (PIXELS, GRID)}


def _opened(number: int, path: str, most_pixels: int) -> Image:
    """The image in a file, in red, green and blue; `BatchError` with its number and path."""
    from PIL import Image, UnidentifiedImageError

    where = f"has an image {number} in {IMAGES!r}, {path!r}, that"
    try:
        with Image.open(path) as image:
            width, height = image.size
            if not width or not height:
                raise BatchError(f"{where} is of size {width} x {height}; remove it")
            if width * height > most_pixels:
                raise BatchError(
                    f"{where} has {width} x {height} pixels, more than data.max_image_pixels = {most_pixels}; make it "
                    "smaller, or raise the limit"
                )
            frames = getattr(image, "n_frames", 1)
            if frames > 1:
                raise BatchError(f"{where} is animated ({frames} frames); save one frame as an image")
            return image.convert("RGB")
    except FileNotFoundError as error:
        raise BatchError(f"{where} is not there; correct the path, which is relative to the data") from error
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise BatchError(f"{where} cannot be read: {error}") from error


class _Places:
    """Replaces the places of images by ``marker``, and collects the paths of all in order."""

    def __init__(self, marker: str, column: list[str]) -> None:
        self._marker = marker
        self._column = column
        self._named: list[str] = []
        self.count = 0

    @property
    def paths(self) -> list[str]:
        """Paths in messages, and the rest of the column."""
        return self._named + self._column

    def marked(self, value: Any) -> Any:
        """A text, or messages, with markers; values of another form stay as they are."""
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, list):
            return [self._message(message) for message in value]
        return value

    def _message(self, message: Any) -> Any:
        if not isinstance(message, Mapping):
            return message
        content = message.get("content")
        if isinstance(content, str):
            return {**message, "content": self._text(content)}
        if isinstance(content, list) and any(_is_image(part) for part in content):
            return {**message, "content": [self._part(part) for part in content]}
        return message

    def _part(self, part: Any) -> Any:
        if not _is_image(part):
            return part
        self.count += 1
        if isinstance(part.get("image"), str):
            self._named.append(part["image"])
        elif self._column:
            self._named.append(self._column.pop(0))
        return {"type": "text", "text": self._marker}

    def _text(self, text: str) -> str:
        if not self._column or PLACE not in text:
            return text
        places = min(text.count(PLACE), len(self._column))
        self.count += text.count(PLACE)
        self._named += [self._column.pop(0) for _ in range(places)]
        return text.replace(PLACE, self._marker)


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "image"
