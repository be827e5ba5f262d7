"""JSON files: one example on each line, or one list of them."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from core_rl.errors import BatchError, ConfigError
from core_rl_trainer.data.examples import Example, Examples

__all__ = ["ListedExamples", "read_json"]

MARK = b"\xef\xbb\xbf"
"""The byte-order mark that some editors put in front of UTF-8."""


def read_json(path: Path) -> Examples:
    """The examples of ``path``. Raises `ConfigError` for a file of another type."""
    try:
        with path.open("rb") as file:
            head = file.read(4096).removeprefix(MARK).lstrip()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    if b"\0" in head or (path.suffix not in (".json", ".jsonl", ".ndjson") and head[:1] not in (b"{", b"")):
        raise ConfigError(
            f"{path}: is no JSONL file; data files are .jsonl, .json, .parquet and .csv. Convert it, or correct "
            "its suffix"
        )
    if path.suffix == ".json" and head[:1] == b"[":
        return _read_list(path)
    return JsonLines(path)


class JsonLines(Examples):
    """A JSONL file, of which only the places of its lines are in memory. Empty lines do not count."""

    def __init__(self, path: Path) -> None:
        self.origin = str(path)
        self._file = path.open("rb")
        self._places, self._numbers = array("Q"), array("Q")
        place = 0
        for number, line in enumerate(self._file, start=1):
            if line.strip():
                self._places.append(place)
                self._numbers.append(number)
            place += len(line)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> Example:
        self._file.seek(self._places[index])
        line = self._file.readline()
        return _parse(line.removeprefix(MARK) if index == 0 else line, self.label(index))

    def label(self, index: int) -> str:
        return f"line {self._numbers[index]}"


class ListedExamples(Examples):
    """Examples in memory."""

    def __init__(self, origin: str, examples: Sequence[Any]) -> None:
        self.origin = origin
        self._examples = examples

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> Example:
        return _checked(self._examples[index], self.label(index))


def _read_list(path: Path) -> Examples:
    try:
        found = json.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:  # not JSON, or not UTF-8
        raise BatchError(f"{path} is not JSON: {error}") from error
    return ListedExamples(str(path), found)


def _parse(line: bytes, label: str) -> Example:
    """The object in ``line``; `BatchError` with what is wrong with it."""
    try:
        example = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BatchError(f"{label} is not UTF-8: {error.reason} at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise BatchError(f"{label} is not JSON: {error.msg} at column {error.colno}") from error
    return _checked(example, label)


def _checked(example: Any, label: str) -> Example:
    if isinstance(example, dict):
        return example
    raise BatchError(f"{label} is a {type(example).__name__}; it must be an object with a 'prompt'")
