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
from collections.abc import Callable, Iterator, Mapping, Sequence
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


class LineExamples(Examples):
    """Examples of a file, of which only the places and the lines are in memory. Empty lines do not count."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self.origin = str(path)
        self._file = file
        self._places, self._lines = array("Q"), array("Q")

    def __len__(self) -> int:
        return len(self._places)

    def label(self, index: int) -> str:
        return f"line {self._lines[index]}"


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
    return JsonLines(path, file)


class JsonLines(LineExamples):
    """A JSONL file."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        super().__init__(path, file)
        place = file.tell()
        for number, line in enumerate(file, start=1):
            if line.strip():
                self._places.append(place)
                self._lines.append(number)
            place += len(line)

    def __getitem__(self, index: int) -> Example:
        self._file.seek(self._places[index])
        return _parse(self._file.readline(), self.label(index))


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
    rows = CsvRows(path, _open(path), separator)
    if not rows.columns:
        raise ConfigError(f"{path} is empty; write examples into it")
    raise_all(ConfigError, f"{path}: line 1", _header_problems(rows.columns, separator))
    if not len(rows):
        raise ConfigError(f"{path} has no rows; write examples into it")
    return rows


class CsvRows(LineExamples):
    """A CSV file, whose header is ``columns``."""

    def __init__(self, path: Path, file: IO[bytes], separator: str) -> None:
        super().__init__(path, file)
        self._separator = separator
        self.columns: list[str] = []
        csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # 131,072 characters by default
        self._scan()

    def _scan(self) -> None:
        """Read the header, and the place and line of each row."""
        place, reader = self._file.tell(), self._reader("surrogateescape")
        line = 1
        try:
            for cells in reader:
                if cells and not self.columns:
                    self.columns = cells
                elif cells:
                    self._places.append(place)
                    self._lines.append(line)
                place, line = self._file.tell(), reader.line_num + 1
        except csv.Error as error:
            raise ConfigError(
                f"{self.origin}: line {line} is not CSV: {error}; quote a text with quotes in it, and double them"
            ) from error

    def _reader(self, errors: str) -> Reader:
        lines: Iterator[str] = (line.decode("utf-8", errors) for line in self._file)
        return csv.reader(lines, delimiter=self._separator, strict=True)

    def __getitem__(self, index: int) -> Example:
        self._file.seek(self._places[index])
        try:
            cells = next(self._reader("strict"))
        except UnicodeDecodeError as error:
            raise BatchError(
                f"{self.label(index)} is not UTF-8: {error.reason} at byte {error.start}"
            ) from error
        if len(cells) < len(self.columns):
            raise BatchError(f"{self.label(index)} has no cell for the column {self.columns[len(cells)]!r}")
        if len(cells) > len(self.columns):
            raise BatchError(
                f"{self.label(index)} has {len(cells)} cells for {len(self.columns)} columns: "
                f"{cells[len(self.columns)]!r} comes after the column {self.columns[-1]!r}; quote texts that have "
                f"{NAMES[self._separator]}"
            )
        return dict(zip(self.columns, cells, strict=True))


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
