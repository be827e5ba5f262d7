"""`json_text`: values of samples as strict JSON, for reward servers, records and pages."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import PurePath
from typing import Any
from uuid import UUID

from core_rl.errors import BatchError
from core_rl_trainer.data.image_files import is_picture, png
from core_rl_trainer.data.json_text import WrittenFloat

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
        members = {_name(name): _text(member) for name, member in value.items()}
        if len(members) < len(value):
            raise BatchError(f"has names that are equal in JSON: {shown(list(value))}")
        return (
            "{"
            + ", ".join(f"{json.dumps(name, ensure_ascii=False)}: {text}" for name, text in members.items())
            + "}"
        )
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


def _name(name: object) -> str:
    return name if isinstance(name, str) else _text(name).strip('"')


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
