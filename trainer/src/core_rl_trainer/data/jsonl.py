"""JSON files: one example on each line, or one list of them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from core_rl.errors import BatchError, ConfigError
from core_rl_trainer.data.examples import Example, Examples
from core_rl_trainer.data.json_text import check_characters, parse_json
from core_rl_trainer.data.text_files import data_suffix, open_data

__all__ = ["ListedExamples", "read_json"]


def read_json(path: Path) -> Examples:
    """The examples of ``path``. Raises `ConfigError` for a file of another type."""
    file, suffix = open_data(path), data_suffix(path)
    start = file.tell()
    head = file.read(4096).lstrip()
    file.seek(start)
    if b"\0" in head or (suffix not in (".json", ".jsonl", ".ndjson") and head[:1] not in (b"{", b"")):
        raise ConfigError(
            f"{path}: is no JSONL file; data files are .jsonl, .json, .parquet and .csv. Convert it, or correct "
            "its suffix"
        )
    if suffix == ".json" and head[:1] == b"[":
        return _read_list(str(path), file.read())
    return JsonLines(str(path), file)


class JsonLines(Examples):
    """A JSONL file, of which only the places of its lines are in memory. Empty lines do not count."""

    def __init__(self, origin: str, file: IO[bytes]) -> None:
        self.origin = origin
        self._file = file
        self._places, self._numbers = array("Q"), array("Q")
        place = file.tell()
        for number, line in enumerate(self._file, start=1):
            if line.strip():
                self._places.append(place)
                self._numbers.append(number)
            place += len(line)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> Example:
        self._file.seek(self._places[index])
        return _parse(self._file.readline(), self.label(index))

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
        example = _checked(self._examples[index], self.label(index))
        check_characters(example, self.label(index))
        return example


def _read_list(origin: str, content: bytes) -> Examples:
    try:
        return ListedExamples(origin, parse_json(content.decode("utf-8")))
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise BatchError(f"{origin}: line {line} is not UTF-8: {error.reason}") from error
    except BatchError as error:
        raise BatchError(f"{origin} {error}") from error


def _parse(line: bytes, label: str) -> Example:
    """The object in ``line``; `BatchError` with what is wrong with it."""
    try:
        example = parse_json(line.rstrip(b"\r\n").decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BatchError(f"{label} is not UTF-8: {error.reason} at byte {error.start}") from error
    except BatchError as error:
        raise BatchError(f"{label} {error}") from error
    if b"\\u" in line:
        check_characters(example, label)
    return _checked(example, label)


def _checked(example: Any, label: str) -> Example:
    if isinstance(example, dict):
        return example
    raise BatchError(f"{label} is a {type(example).__name__}; it must be an object with a 'prompt'")
