"""JSON as data files have it: numbers that keep their digits, and refused where a value is ambiguous or damaged."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn, Self

from core_rl.errors import BatchError

STRUCTURED = ("messages", "conversations", "tools", "documents", "chat_template_kwargs", "history")
"""Fields that are never texts."""
CHAT = re.compile(r"""\s*\[\s*\{\s*["'](role|from|content)["']\s*:""")
"""The beginning of a chat as JSON, or as Python prints it."""


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
        raise BatchError(f"is not JSON: {error.msg} at {line}column {error.colno}") from error
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
        check_characters(value, "which")
    except BatchError as error:
        raise BatchError(
            f"has a text as {name!r} that {str(error).removeprefix('which ')}; write chats and tools with json.dumps, "
            "or as lists in JSONL or parquet"
        ) from error
    return value


def check_characters(example: Any, label: str) -> None:
    """Raise `BatchError` for half of a surrogate pair, which JSON can write and UTF-8 cannot."""
    if (place := next(_lone_surrogates(example, ""), None)) is not None:
        raise BatchError(
            f"{label} has half of a surrogate pair (a character cut in two) in {place}; restore or remove it"
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
