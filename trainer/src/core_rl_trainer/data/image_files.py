"""Pictures in red, green and blue from the files, texts and arrays that examples have as images."""

from __future__ import annotations

import base64
import binascii
import re
import struct
import sys
import zlib
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from stat import S_ISREG
from typing import TYPE_CHECKING, Self, TypeGuard
from urllib.parse import unquote, unquote_to_bytes, urlsplit
from warnings import catch_warnings

import numpy as np

from core_rl.errors import BatchError
from core_rl_trainer.data.messages import shortened

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFile import ImageFile

KEYS = ("bytes", "image", "image_url", "url", "source", "data", "base64", "path")
"""Keys of an object that hold an image, in the order of preference."""
READ = (*KEYS, "type", "index", "media_type", "mime_type")
ENCODED = ("bytes", "data", "base64")
"""Keys among these whose texts are base64."""
BASE64 = ("iVBORw0KGgo", "/9j/", "R0lGOD", "UklGR")
"""The beginning of PNG, JPEG, GIF and WebP files in base64."""
UNREAD_FIX = "remove it (sizes are settings of the model's preprocessor_config.json)"
NEUTRAL = ("detail", "auto")
"""A key of OpenAI's images, with the value without an effect."""
URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/[^\s]")
STILL = ("MPO", "PSD")
"""Formats whose further frames are previews or layers of the first one."""
DEEP = ("PNG", "PPM")
"""Formats that have 16 bits where Pillow gives its mode I."""
GREYS = {"1": 1, "L;2": 3, "L;4": 15}
"""White by raw mode, in PNG files of fewer than 8 bits."""
UNREADABLE = (
    *(ArithmeticError, LookupError, EOFError, OSError, SyntaxError, TypeError, ValueError),
    *(struct.error, zlib.error),
)
"""Errors of Pillow's decoders for damaged files."""


class ImageName(str):
    """The name of an image in messages and records: the path of its file, or a label of an embedded one."""

    __slots__ = ("content", "place")

    place: str
    """The image in its example, such as ``image 1 in 'images'``."""
    content: bytes | None
    """The embedded file; None for a file on the disk."""

    def __new__(cls, name: str, place: str = "", content: bytes | None = None) -> Self:
        image = super().__new__(cls, name)
        image.place, image.content = place, content
        return image

    @property
    def source(self) -> str | bytes:
        """The path of the file, or its content: equal for equal images."""
        return str(self) if self.content is None else self.content


def image_name(value: object, place: str, label: str, directory: Path | None) -> ImageName:
    """The name of the image ``value``, whose path is relative to ``directory``; ``label`` is that of an embedded one.

    Without a ``directory``, for a dataset of the Hub, paths are absolute.

    Raises `BatchError` for a value that is no image, such as a URL.
    """
    try:
        source = _source(value, directory)
    except BatchError as error:
        raise BatchError(f"has an {place} that {error}") from error
    if isinstance(source, str):
        return ImageName(source, f"{place}, {shortened(source)},")
    return ImageName(label + _description(source), place, source)


# --------------------------------------------------------------------- sources


def _source(value: object, directory: Path | None) -> str | bytes:
    """A path, or the content of a file. Raises `BatchError` with a phrase about the image, without a subject."""
    if isinstance(value, str):
        return _source_of_text(value, directory)
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    if isinstance(value, Mapping):
        name = next((key for key in KEYS if value.get(key) not in (None, "", b"")), None)
        if name is None:
            raise BatchError(
                f"is the object {shortened(value)}, which has neither 'bytes' nor 'path'; write either"
            )
        if (unread := unread_key(value)) is not None:
            raise BatchError(f"has {unread!r}, which is not read; {UNREAD_FIX}")
        inner = value[name]
        return _decoded(inner) if name in ENCODED and isinstance(inner, str) else _source(inner, directory)
    if is_picture(value):
        return png(value)
    if isinstance(value, list | tuple | np.ndarray):
        return png(_picture(value))
    raise BatchError(f"is {shortened(value)}; write a path, {{'bytes': ...}}, or a data URI")


def _source_of_text(text: str, directory: Path | None) -> str | bytes:
    if text[:5].lower() == "data:":
        header, _, body = text.partition(",")
        return _decoded(body) if header.lower().endswith(";base64") else unquote_to_bytes(body)
    if text.startswith(BASE64):
        return _decoded(text)
    if text[:5].lower() == "file:":
        address = urlsplit(text)
        text = unquote(address.path if address.netloc in ("", "localhost") else address.netloc + address.path)
    elif URL.match(text):
        raise BatchError(
            f"is the URL {shortened(text)}, and nothing is downloaded; save it as a file, and name its path"
        )
    if not text.strip():
        raise BatchError("is an empty text; write its path, or remove it together with its place")
    path = Path(text).expanduser() if text.startswith("~/") else Path(text)
    if directory is None and not path.is_absolute():
        raise BatchError(
            f"is the path {shortened(text)} in a dataset of the Hub, whose files are not downloaded; download it with "
            "`hf download --repo-type dataset NAME --local-dir DIRECTORY`, and name the directory as the source"
        )
    return str((directory or Path()) / path)


def unread_key(value: Mapping[str, object]) -> str | None:
    """A key of an image's object that would have an effect elsewhere, or None."""
    keys = (key for key, inner in value.items() if inner and key not in READ and (key, inner) != NEUTRAL)
    return next(keys, None)


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise BatchError(f"is no base64 ({error}): {shortened(text)}; encode the whole file anew") from error


def _picture(value: object) -> Image:
    """The picture of an array ``[H, W]``, or ``[H, W, C]`` of 1, 3 or 4 channels, in 8 bits.

    White is 65535 in ``uint16``, 1 in floats and booleans, and 255 in other integers.
    """
    from PIL import Image

    try:
        array = np.asarray(value)
    except ValueError as error:
        raise BatchError("is a list whose rows are not equally long; write H x W x 3 numbers") from error
    if array.dtype.kind not in "biuf":
        raise BatchError(f"is {shortened(value)}, which has no numbers; write one list of all images")
    shaped = array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (1, 3, 4))
    numeric = shaped and array.size > 0
    white = 65535 if array.dtype == np.uint16 else 1 if array.dtype.kind in "bf" else 255
    if not numeric or not (array.min() >= 0 and array.max() <= white):
        span = f" with values from {array.min()} to {array.max()}" if numeric else ""
        raise BatchError(
            f"is an array of {array.dtype} of shape {list(array.shape)}{span}; write H x W or H x W x 3 integers from "
            "0 to 255, or floats from 0 to 1, or the path of a file"
        )
    values = np.rint(array.astype(np.float64) * 255 / white).astype(np.uint8)
    return Image.fromarray(values.squeeze(2) if array.shape[2:] == (1,) else values)


def is_picture(value: object) -> TypeGuard[Image]:
    """Whether ``value`` is an image of Pillow, which need not be imported."""
    return hasattr(value, "getexif")


def png(picture: Image) -> bytes:
    """The file of ``picture`` as `to_rgb` gives it."""
    content = BytesIO()
    to_rgb(picture).save(content, format="PNG")
    return content.getvalue()


def _description(content: bytes) -> str:
    """Format and size of an embedded file; empty where it cannot be read, which is an error later."""
    from PIL import Image

    try:
        with catch_warnings(action="ignore"), Image.open(BytesIO(content)) as image:
            return f" ({image.format}, {image.width} x {image.height})"
    except (*UNREADABLE, Image.DecompressionBombError):
        return ""


# -------------------------------------------------------------------- pictures


def read_image(source: str | bytes, most_pixels: int) -> Image:
    """The picture of a file, by its path or its content, of at most ``most_pixels``, as `to_rgb` gives it.

    Raises `BatchError` with a phrase about the image, without a subject.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        if isinstance(source, str) and not S_ISREG(Path(source).stat().st_mode):
            raise BatchError("is no file; name an image file")
        file = BytesIO(source) if isinstance(source, bytes) else source
        with catch_warnings(action="ignore"), Image.open(file) as image:  # our limit of pixels counts
            _require_size(*image.size, most_pixels)
            frames = getattr(image, "n_frames", 1)
            if frames > 1 and image.format not in STILL:
                raise BatchError(
                    f"is an animation or several pages ({frames} frames); save a single frame as an image"
                )
            _scale_key(image)
            return to_rgb(image)
    except FileNotFoundError as error:
        raise BatchError("is not there; correct the path, which is relative to the data") from error
    except UnidentifiedImageError as error:
        content = source if isinstance(source, bytes) else Path(source).read_bytes()
        problem = (
            "Pillow knows no such format; save it as PNG or JPEG" if content else "it is empty; copy it again"
        )
        if content.startswith(b"version https://git-lfs"):
            problem = "it is a pointer of Git LFS; run `git lfs pull` in its repository"
        raise BatchError(f"cannot be read: {problem}") from error
    except Image.DecompressionBombError as error:
        raise BatchError(f"has more pixels than Pillow reads; make it smaller ({error})") from error
    except UNREADABLE as error:
        reason = getattr(error, "strerror", None)
        raise BatchError(
            f"cannot be read: {reason or error}; copy it again, or save it as PNG or JPEG"
        ) from error


def small_copy(source: str | bytes, side: int) -> str | None:
    """A data URI of the picture in at most ``side`` x ``side`` pixels; None where it cannot be read."""
    try:
        picture = read_image(source, sys.maxsize)
    except BatchError:
        return None
    picture.thumbnail((side, side))
    return f"data:image/png;base64,{base64.b64encode(png(picture)).decode()}"


def _require_size(width: int, height: int, most_pixels: int) -> None:
    if not width or not height:
        raise BatchError(f"is of size {width} x {height}; remove it")
    if width * height > most_pixels:
        raise BatchError(
            f"has {width} x {height} pixels, more than data.max_image_pixels = {most_pixels}; make it smaller, or "
            "raise the limit"
        )


def _scale_key(image: ImageFile) -> None:
    """Give the transparent colour of a PNG file the depth to which Pillow scales the pixels; refuse 12 bits."""
    depth = image.tile[0].args if image.tile else None
    if isinstance(depth, tuple) and "I;12" in depth:
        raise BatchError("has values of 12 bits; save it with 8 or 16 bits")
    key = image.info.get("transparency")
    if isinstance(key, int) and isinstance(depth, str) and depth in GREYS:
        most = GREYS[depth]
        image.info["transparency"] = (key & most) * (255 // most)
    elif isinstance(key, tuple) and depth == "RGB;16B":
        image.info["transparency"] = tuple(value >> 8 for value in key)


def to_rgb(image: Image) -> Image:
    """``image`` upright, over white, and in 8 bits of red, green and blue.

    Orientation and colours are those of ``transformers.image_utils.load_image``. Values of 16 bits are divided by 257.
    Raises `BatchError` for values of 32 bits.
    """
    from PIL import Image, ImageOps

    if image.mode == "F" or (image.mode == "I" and image.format not in DEEP):
        raise BatchError(
            f"has values of 32 bits (Pillow's mode {image.mode}), whose white is not known; save it with 8 or 16 bits"
        )
    image = ImageOps.exif_transpose(image)
    key = image.info.get("transparency")
    if image.mode.startswith("I"):
        values = np.asarray(image)
        rgb = Image.fromarray(((values.astype(np.int64) + 128) // 257).astype(np.uint8)).convert("RGB")
        if isinstance(key, int):
            rgb.paste("white", mask=Image.fromarray(values == key))
        return rgb
    if image.mode == "La":
        image = image.convert("LA")
    if not image.has_transparency_data:
        return image.convert("RGB")
    white = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
