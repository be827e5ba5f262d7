"""Data files of text: JSON lines, JSON lists, CSV and TSV, decompressed and without a byte-order mark.

Values keep the text of the file: numbers of JSON have their digits, and cells of CSV are texts, never a number, a truth
value or a missing value.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import lzma
import shutil
import sys
import tempfile
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from core_rl.errors import BatchError, ConfigError, raise_all
from core_rl_trainer.data.examples import Example, Examples
from core_rl_trainer.data.json_text import check_characters, parse_json

if TYPE_CHECKING:
    from _csv import Reader

__all__ = ["SEPARATORS", "data_suffix", "read_csv", "read_json"]

OPENERS: Mapping[str, Callable[[Path], Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
COMMANDS: Mapping[str, str] = {".zst": "zstd -d", ".zip": "unzip", ".lz4": "lz4 -d", ".7z": "7z x"}
"""Commands that decompress unsupported files, by suffix."""

MARK = b"\xef\xbb\xbf"
"""The byte-order mark that some editors put in front of UTF-8."""
WIDE_MARKS = (b"\xff\xfe", b"\xfe\xff")


SEPARATORS = {".csv": ",", ".tsv": "\t"}
"""Separators of columns, by suffix."""
NAMES = {",": "a comma", "\t": "a tab", ";": "a semicolon", "|": "a vertical bar"}


def data_suffix(path: Path) -> str:
    """The suffix of the format, in lower case: ``.jsonl`` of ``train.JSONL.gz``."""
    compressed = path.suffix.lower() in OPENERS or path.suffix.lower() in COMMANDS
    return (path.with_suffix("") if compressed else path).suffix.lower()


def _open(path: Path) -> IO[bytes]:
    """``path`` for reading and seeking, after a byte-order mark; compressed files in a temporary copy.

    Raises `ConfigError` for a file that cannot be read or is not UTF-8 by its first bytes.
    """
    suffix = path.suffix.lower()
    if suffix in COMMANDS:
        raise ConfigError(
            f"{path}: {suffix} files are not read; decompress it (`{COMMANDS[suffix]} {path}`), or write .gz"
        )
    try:
        file = _decompressed(path) if suffix in OPENERS else path.open("rb")
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise ConfigError(f"{path}: cannot be decompressed: {error}; copy it again") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    head = file.read(4)
    if head.startswith(WIDE_MARKS):
        raise ConfigError(f"{path}: is UTF-16 or UTF-32; save it as UTF-8")
    file.seek(len(MARK) if head.startswith(MARK) else 0)
    return file


def _decompressed(path: Path) -> IO[bytes]:
    """A copy that has no name and ends with the process."""
    copy = tempfile.TemporaryFile()  # noqa: SIM115
    with OPENERS[path.suffix.lower()](path) as packed:
        shutil.copyfileobj(packed, copy)
    copy.seek(0)
    return copy


def read_json(path: Path) -> Examples:
    """The examples of ``path``. Raises `ConfigError` for a file of another type."""
    file, suffix = _open(path), data_suffix(path)
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
    return _read_lines(str(path), file)


def _read_lines(origin: str, file: IO[bytes]) -> Examples:
    """The examples of a JSONL file, of which only the places and the lines are in memory. Empty lines do not count."""
    place, places, lines = file.tell(), array("Q"), array("Q")
    for number, line in enumerate(file, start=1):
        if line.strip():
            places.append(place)
            lines.append(number)
        place += len(line)

    def read(index: int) -> Example:
        file.seek(places[index])
        return _parse(file.readline(), label(index))

    def label(index: int) -> str:
        return f"line {lines[index]}"

    return Examples(origin=origin, count=len(places), read=read, label=label)


def _read_list(origin: str, content: bytes) -> Examples:
    try:
        examples = parse_json(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise BatchError(f"{origin}: line {line} is not UTF-8: {error.reason}") from error
    except BatchError as error:
        raise BatchError(f"{origin} {error}") from error

    def read(index: int) -> Example:
        example = _checked(examples[index], label(index))
        check_characters(example, label(index))
        return example

    def label(index: int) -> str:
        return f"example {index + 1}"

    return Examples(origin=origin, count=len(examples), read=read, label=label)


def _parse(line: bytes, label: str) -> Example:
    """The object in ``line``. Raises `BatchError` about it."""
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


def read_csv(path: Path, separator: str) -> Examples:
    """The rows of ``path`` after its header. Raises `ConfigError` for a file that is not CSV."""
    file = _open(path)
    columns, places, lines = _scan(path, file, separator)
    if not columns:
        raise ConfigError(f"{path} is empty; write examples into it")
    raise_all(ConfigError, f"{path}: line 1", _header_problems(columns, separator))
    if not places:
        raise ConfigError(f"{path} has no rows; write examples into it")

    def read(index: int) -> Example:
        file.seek(places[index])
        return _parse_row(file, separator, columns, label(index))

    def label(index: int) -> str:
        return f"line {lines[index]}"

    return Examples(origin=str(path), count=len(places), read=read, label=label)


def _scan(path: Path, file: IO[bytes], separator: str) -> tuple[list[str], array[int], array[int]]:
    """The header of a CSV file, and the place and line of each row."""
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # 131,072 characters by default
    columns: list[str] = []
    places, lines = array("Q"), array("Q")
    place, line, reader = file.tell(), 1, _reader(file, separator, "surrogateescape")
    try:
        for cells in reader:
            if cells and not columns:
                columns = cells
            elif cells:
                places.append(place)
                lines.append(line)
            place, line = file.tell(), reader.line_num + 1
    except csv.Error as error:
        raise ConfigError(
            f"{path}: line {line} is not CSV: {error}; quote a text with quotes in it, and double them"
        ) from error
    return columns, places, lines


def _reader(file: IO[bytes], separator: str, errors: str) -> Reader:
    lines: Iterator[str] = (line.decode("utf-8", errors) for line in file)
    return csv.reader(lines, delimiter=separator, strict=True)


def _parse_row(file: IO[bytes], separator: str, columns: list[str], label: str) -> Example:
    """The row at which ``file`` stands. Raises `BatchError` about it."""
    try:
        cells = next(_reader(file, separator, "strict"))
    except UnicodeDecodeError as error:
        raise BatchError(f"{label} is not UTF-8: {error.reason} at byte {error.start}") from error
    if len(cells) < len(columns):
        raise BatchError(f"{label} has no cell for the column {columns[len(cells)]!r}")
    if len(cells) > len(columns):
        raise BatchError(
            f"{label} has {len(cells)} cells for {len(columns)} columns: {cells[len(columns)]!r} comes after the "
            f"column {columns[-1]!r}; quote texts that have {NAMES[separator]}"
        )
    return dict(zip(columns, cells, strict=True))


def _header_problems(columns: list[str], separator: str) -> Iterator[str]:
    """Problems of a header; the first is the separator, from which others follow."""
    present = [mark for mark in NAMES if mark != separator and mark in columns[0]]
    if len(columns) == 1 and present:
        yield (
            f"has the one column {columns[0]!r}: its columns are separated by {NAMES[present[0]]}, and must be by "
            f"{NAMES[separator]}; write it so, or as JSONL"
        )
        return
    for number, name in enumerate(columns, start=1):
        if not name:
            yield f"column {number} has no name; name it (pandas writes its index so: to_csv(index=False))"
        elif name != name.strip():
            yield f"column {number}, {name!r}, has blanks around its name; remove those next to separators"
        elif name in columns[: number - 1]:
            yield f"column {number} has the name {name!r} of column {columns.index(name) + 1}; rename or remove it"
