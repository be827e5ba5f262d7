"""Images in the fields of an example: in columns, and in parts of messages."""

from __future__ import annotations

import mimetypes
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from core_rl.errors import BatchError
from core_rl_trainer.data.examples import Example, Examples
from core_rl_trainer.data.image_files import BASE64, KEYS, UNREAD_FIX, ImageName, image_name, unread_key
from core_rl_trainer.data.kinds import IMAGES
from core_rl_trainer.data.plain import parse_json

COLUMNS = (IMAGES, "image")
"""Fields of an example with its images; an example has either."""
PLACE = "<image>"
"""The place of an image in a text."""
CHATS = ("prompt", "messages", "answer", "chosen", "rejected")
"""Fields of an example whose messages may have images among the parts of their content."""
OBJECTS = re.compile(r"""\s*(\[\s*["'{\]]|\{\s*["'}])""")
"""The beginning of images as JSON, in a cell."""


def located(examples: Examples, directory: Path | None) -> Examples:
    """``examples`` whose images are `ImageName`s, with paths that are relative to ``directory``, if any."""
    rows = [row.converted(partial(_with_image_names, directory, row.label)) for row in examples.rows]
    return replace(examples, rows=rows)


def _with_image_names(directory: Path | None, label: str, example: Example) -> Example:
    """``example`` with an `ImageName` for each image, in columns and in parts of messages."""
    numbers = count(1)

    def image(name: str, value: object) -> ImageName:
        number = next(numbers)
        return image_name(value, f"image {number} in {name!r}", f"{label}, image {number}", directory)

    def part(name: str, value: Any) -> Any:
        if not is_image(value):
            return value
        if (unread := unread_key(value)) is not None:
            raise BatchError(f"has an image with {unread!r} in {name!r}, which is not read; {UNREAD_FIX}")
        formed = {"type": "image", "index": value.get("index")}
        return {**formed, "image": image(name, value)} if any(value.get(key) for key in KEYS) else formed

    named = dict(example)
    columns = {name: images for name in COLUMNS if (images := _listed(name, named.pop(name, None)))}
    if len(columns) > 1:
        raise BatchError(f"has {' and '.join(map(repr, COLUMNS))}; remove either column")
    for name, values in columns.items():
        named[IMAGES] = [image(name, value) for value in values]
    for name in CHATS:
        if isinstance(example.get(name), list):
            named[name] = [with_content(message, partial(part, name)) for message in example[name]]
    return named


def with_content(message: Any, part: Callable[[Any], Any], text: Callable[[str], str] = str) -> Any:
    """``message`` with the results of ``part`` for the parts of its content, or of ``text`` for a text."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if isinstance(content, list):
        return {**message, "content": [part(item) for item in content]}
    return {**message, "content": text(content)} if isinstance(content, str) else message


def _listed(name: str, value: Any) -> list[Any]:
    """The images of the column ``name`` with one, several or none."""
    try:
        value = parse_json(value) if isinstance(value, str) and OBJECTS.match(value) else value
    except BatchError as error:
        raise BatchError(f"has a text as {name!r} that {error}; write paths with json.dumps") from error
    null = isinstance(value, Mapping) and not any(value.values())  # in tables
    if value is None or null or (isinstance(value, str | bytes | list) and not value):
        return []
    return value if isinstance(value, list) and not _is_array(value) else [value]


def _is_array(value: Any) -> bool:
    """Whether nested lists are one picture, ``[H, W]`` or ``[H, W, C]``, and not several."""
    lengths: list[int] = []
    while isinstance(value, list) and value:
        lengths.append(len(value))
        value = value[0]
    numbers = isinstance(value, int | float)
    return numbers and (len(lengths) == 2 or (len(lengths) == 3 and lengths[-1] in (1, 3, 4)))


def is_image(part: Any) -> bool:
    """Whether ``part`` of a message is an image."""
    return isinstance(part, Mapping) and part.get("type") in ("image", "image_url")


def image_parts(chat: Any) -> Iterator[Mapping[str, Any]]:
    """The images among the parts of messages."""
    for message in chat if isinstance(chat, list) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        yield from filter(is_image, content if isinstance(content, list) else ())


def is_file(value: Any) -> bool:
    """Whether a column of any name has the path or the file of an image."""
    if isinstance(value, Mapping):
        value = value.get("bytes")
    if isinstance(value, bytes):
        return value.startswith((b"\x89PNG", b"\xff\xd8\xff"))
    return isinstance(value, str) and len(value.split()) == 1 and is_pictured(value)


def is_pictured(value: Any) -> bool:
    """Whether a column ``image`` or ``images`` has images, and not numbers or names of something else."""
    if isinstance(value, str):
        guess, _ = mimetypes.guess_type(value, strict=False)
        return (guess or "").startswith("image/") or value.startswith(("data:image/", *BASE64))
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return any(map(is_pictured, value))
    return bool(value) and not isinstance(value, int | float)


def all_texts(value: Any) -> Iterator[str]:
    """All texts in a field of an example; an image among them is its place."""
    if value is None:  # as most fields: the checks below take a while
        return
    if isinstance(value, str):
        yield value
    elif is_image(value):
        yield PLACE
    elif isinstance(value, Mapping | list):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from all_texts(inner)
