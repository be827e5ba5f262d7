"""JSON of data files, whose numbers keep their digits; and samples as strict JSON, for servers, records and pages."""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import PurePath
from typing import Any, NoReturn, Self
from uuid import UUID

from core_rl.errors import BatchError
from core_rl_trainer.data.image_files import is_picture, png

STRUCTURED = ("messages", "conversations", "tools", "documents", "chat_template_kwargs", "history")
"""Fields that are never texts."""
CHAT = re.compile(r"""\s*\[\s*\{\s*["'](role|from|content)["']\s*:""")
"""The beginning of a chat as JSON, or as Python prints it."""
MEDIA = "_media"
"""The field of a sample that holds the images of each sequence, as arguments of the model; absent without images."""
NUMBER = "_number"
"""The field of a sample that holds its position in the data order of the run."""
ROW = "_row"
"""The field of a sample that holds the number of its source, and of its row there."""
OWN_FIELDS = frozenset({"prompt_ids", MEDIA, NUMBER, ROW})
"""Fields of a sample that the trainer adds; the data has no such columns."""
SIGNATURES = {
    b"\x89PNG": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF8": "image/gif",
    b"RIFF": "image/webp",
}
"""Beginnings of the files of images."""


# --------------------------------------------------------------------- reading


class WrittenFloat(float):
    """A float whose text is the text of the file, such as ``0.50`` or ``1e3``."""

    text: str

    def __new__(cls, text: str) -> Self:
        number = super().__new__(cls, text)
        number.text = text
        return number

    def __str__(self) -> str:
        return self.text


def parse_json(text: str) -> Any:
    """The value of ``text``. Raises `BatchError` with a phrase such as "is not JSON: …", without a subject."""
    try:
        return DECODER.decode(text)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        joined = text.startswith("\ufeff", error.pos)
        reason = "a byte-order mark, as in joined files, to be removed," if joined else error.msg
        raise BatchError(f"is not JSON: {reason} at {line}column {error.colno}") from error
    except RecursionError as error:
        raise BatchError("is nested too deeply to be read") from error
    except ValueError as error:  # of the functions below, and of int()
        raise BatchError(f"cannot be read as JSON: {error}") from error


def parsed_chats(example: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Fields among ``names`` whose text is the JSON of a chat or of tools, as tables have it, with their values.

    Raises `BatchError` without a subject for a text that is no such JSON. An empty cell is None.
    """
    fields = {name: value for name in names if isinstance(value := example.get(name), str)}
    return {
        name: _parsed_chat(name, value)
        for name, value in fields.items()
        if name in STRUCTURED or CHAT.match(value)
    }


def _parsed_chat(name: str, text: str) -> Any:
    if not text.strip():
        return None
    try:
        value = parse_json(text)
        check_characters(value)
    except BatchError as error:
        raise BatchError(
            f"has a text as {name!r} that {error}; write chats and tools with json.dumps, "
            "or as lists in JSONL or parquet"
        ) from error
    return value


def check_characters(value: Any) -> None:
    """Raise `BatchError` without a subject for half of a surrogate pair, which JSON can write and UTF-8 cannot."""
    if (place := next(_lone_surrogates(value, ""), None)) is not None:
        raise BatchError(
            f"has half of a surrogate pair (a character cut in two) in {place}; restore or remove it"
        )


def _lone_surrogates(value: Any, place: str) -> Iterator[str]:
    """The places of damaged texts, such as ``'messages'[0]['content']``."""
    if isinstance(value, str):
        position = next((n for n, letter in enumerate(value) if "\ud800" <= letter <= "\udfff"), None)
        if position is not None:
            yield f"{place}, character {position + 1}"
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _lone_surrogates(name, f"the name {name!r}")
            yield from _lone_surrogates(inner, f"{place}[{name!r}]" if place else repr(name))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _lone_surrogates(inner, f"{place}[{number}]")


def _finite(text: str) -> WrittenFloat:
    number = WrittenFloat(text)
    if math.isinf(number):
        raise ValueError(f"the number {text} is out of range; write it as a text")
    return number


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON; write a number, a text or null")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in members if names.count(name) > 1)
        raise ValueError(f"an object has {twice!r} twice; leave one value")
    return members


DECODER = json.JSONDecoder(
    parse_float=_finite, parse_constant=_refuse_constant, object_pairs_hook=_without_duplicates
)


# --------------------------------------------------------------------- writing


def sample_fields(sample: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the data, without `OWN_FIELDS`."""
    return {name: value for name, value in sample.items() if name not in OWN_FIELDS}


def json_text(value: object) -> str:
    """``value`` as strict JSON.

    Numbers keep their digits; numbers that are not finite, and missing times, are null. Times are ISO 8601, durations
    too. Bytes and images are data URIs; arrays, tensors, tuples and sets are lists. Raises `BatchError` without a
    subject for other types, for names that become equal, and for a value that is nested too deeply.
    """
    try:
        return _text(value).encode(errors="backslashreplace").decode()  # of half surrogate pairs
    except RecursionError as error:
        raise BatchError("is nested too deeply for JSON") from error


def _text(value: object) -> str:
    if isinstance(value, Mapping):
        members = {
            name if isinstance(name, str) else _text(name).strip('"'): _text(member)
            for name, member in value.items()
        }
        if len(members) < len(value):
            raise BatchError(f"has names that are equal in JSON: {shown(list(value))}")
        pairs = (f"{json.dumps(name, ensure_ascii=False)}: {text}" for name, text in members.items())
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_text, value)) + "]"
    if isinstance(value, AbstractSet):
        return "[" + ", ".join(sorted(map(_text, value))) + "]"
    return _number(value) if isinstance(value, float | Decimal) else _scalar(value)


def _number(value: float | Decimal) -> str:
    if not math.isfinite(value) if isinstance(value, float) else not value.is_finite():
        return "null"
    return str(value) if isinstance(value, WrittenFloat | Decimal) else float.__repr__(value)


def _scalar(value: object) -> str:  # noqa: PLR0911  (a table of types)
    if isinstance(value, Enum):
        return _text(value.value)
    if value is None or isinstance(value, str | int):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
        return json.dumps(f"{'-' * (seconds < 0)}PT{abs(seconds):f}".rstrip("0").rstrip(".") + "S")
    if isinstance(value, date | time):
        return "null" if value != value else json.dumps(value.isoformat())  # noqa: PLR0124  (pandas' NaT)
    if isinstance(value, PurePath | UUID):
        return json.dumps(str(value))
    if isinstance(value, bytes | bytearray | memoryview):
        return json.dumps(_data_uri(bytes(value)))
    if getattr(getattr(value, "dtype", None), "kind", "") in ("M", "m"):  # NumPy's times, to the nanosecond
        times: Any = value
        return _text(times.astype(str).tolist()).replace('"NaT"', "null")
    if callable(to_list := getattr(value, "tolist", None)):
        return _text(to_list())
    if is_picture(value):
        return json.dumps(_data_uri(png(value)))
    raise BatchError(f"is of the type {type(value).__name__}, which JSON has not")


def _data_uri(content: bytes) -> str:
    kind = next((kind for start, kind in SIGNATURES.items() if content.startswith(start)), None)
    return f"data:{kind or 'application/octet-stream'};base64,{base64.b64encode(content).decode()}"


def shown(value: object, most: int = 120) -> str:
    """``value`` in a message: its representation in one line, of at most ``most`` characters."""
    try:
        text = " ".join(repr(value).split())
    except (ValueError, TypeError, RecursionError):  # integers of more digits than Python prints, such as
        text = f"a value of the type {type(value).__name__}"
    return shortened(text, most)


def shortened(text: str, most: int) -> str:
    """``text`` of at most ``most`` characters."""
    return text if len(text) <= most else f"{text[: most - 1]}…"
