"""Data files of text: JSON lines, JSON lists, CSV and TSV, decompressed and without a byte-order mark.

Values keep the text of the file: numbers of JSON have their digits, and cells of CSV are texts, never a number, a truth
value or a missing value.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from core_rl.errors import BatchError, ConfigError, raise_all
from core_rl_trainer.data.examples import Example, Examples
from core_rl_trainer.data.plain import STRUCTURED, check_characters, parse_json

OPENERS: Mapping[str, Callable[[Path, str], Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
COMMANDS: Mapping[str, str] = {".zst": "zstd -d", ".zip": "unzip", ".lz4": "lz4 -d", ".7z": "7z x"}
"""Commands that decompress unsupported files, by suffix."""

MARK = b"\xef\xbb\xbf"
"""The byte-order mark that some editors put in front of UTF-8."""
WIDE_MARKS = (b"\xff\xfe", b"\xfe\xff")
UTF8_FIX = "save it as UTF-8 (in Excel as 'CSV UTF-8')"


SEPARATORS = {".csv": ",", ".tsv": "\t"}
"""Separators of columns, by suffix."""
JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")
NAMES = {",": "a comma", "\t": "a tab", ";": "a semicolon", "|": "a vertical bar"}


def data_suffix(path: Path) -> str:
    """The suffix of the format, in lower case: ``.jsonl`` of ``train.JSONL.gz``."""
    compressed = path.suffix.lower() in OPENERS or path.suffix.lower() in COMMANDS
    return (path.with_suffix("") if compressed else path).suffix.lower()


def _content(path: Path) -> bytes:
    """The bytes of ``path``, decompressed and without a byte-order mark.

    Raises `ConfigError` for a file that cannot be read or is not UTF-8 by its first bytes.
    """
    suffix = path.suffix.lower()
    if suffix in COMMANDS:
        raise ConfigError(
            f"{path}: {suffix} files are not read; decompress it (`{COMMANDS[suffix]} {path}`), or write .gz"
        )
    try:
        with OPENERS.get(suffix, Path.open)(path, "rb") as file:
            content: bytes = file.read()
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise ConfigError(f"{path}: cannot be decompressed: {error}; copy it again") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    if content.startswith(WIDE_MARKS):
        raise ConfigError(f"{path}: is UTF-16 or UTF-32; {UTF8_FIX}")
    return content.removeprefix(MARK)


def read_json(path: Path) -> Examples:
    """The examples of ``path``. Raises `ConfigError` for a file of another type."""
    content, suffix = _content(path), data_suffix(path)
    head = content[:4096].lstrip()
    if b"\0" in head or (suffix not in JSON_SUFFIXES and head[:1] not in (b"{", b"")):
        raise ConfigError(
            f"{path}: is no JSONL file; data files are .jsonl, .json, .parquet and .csv. Convert it, or correct "
            "its suffix"
        )
    if head[:1] == b"[":
        listed = ((f"example {number}", value) for number, value in enumerate(_parsed_list(path, content), 1))
        return Examples.parsed(str(path), listed, _checked)
    if suffix == ".json":
        _refuse_document(path, content)
    lines = ((f"line {number}", line) for number, line in enumerate(content.split(b"\n"), 1) if line.strip())
    return Examples.parsed(str(path), lines, _parse_line)


def _refuse_document(path: Path, content: bytes) -> None:
    """Raise `ConfigError` for one object over several lines, around the examples, or in columns as pandas writes it."""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):  # several objects, or lines with errors
        return
    if not isinstance(document, dict):
        return
    indexed = [isinstance(value, dict) and all(map(str.isdigit, value)) for value in document.values()]
    firsts = [value[0] for value in document.values() if isinstance(value, list) and value]
    around = any(isinstance(first, dict) and not {"role", "from"} & first.keys() for first in firsts)
    around = around and not {"prompt", *STRUCTURED} & document.keys()
    if b"\n" in content.strip() or (indexed and all(indexed)) or around:
        raise ConfigError(
            f"{path}: is one object with {', '.join(map(repr, [*document][:5]))}; write a list of objects, one for "
            "each example (with pandas, to_json(orient='records'))"
        )


def _parsed_list(path: Path, content: bytes) -> list[Any]:
    try:
        values: list[Any] = parse_json(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise BatchError(f"{path}: line {line} is not UTF-8: {error.reason}; {UTF8_FIX}") from error
    except BatchError as error:
        raise BatchError(f"{path} {error}") from error
    return values


def _parse_line(line: bytes) -> Example:
    try:
        return _checked(parse_json(line.rstrip(b"\r\n").decode("utf-8")))
    except UnicodeDecodeError as error:
        raise BatchError(f"is not UTF-8: {error.reason} at byte {error.start}; {UTF8_FIX}") from error


def _checked(example: Any) -> Example:
    check_characters(example)
    if isinstance(example, dict):
        return example
    raise BatchError(f"is a {type(example).__name__}; it must be an object with a 'prompt'")


def read_csv(path: Path, separator: str) -> Examples:
    """The rows of ``path`` after its header. Raises `ConfigError` for a file that is not CSV."""
    (_, columns), *rows = _table(path, separator) or [(0, [])]
    if not columns:
        raise ConfigError(f"{path} is empty; write examples into it")
    raise_all(ConfigError, f"{path}: line 1", _header_problems(columns, separator))
    if not rows:
        raise ConfigError(f"{path} has no rows; write examples into it")
    lines = ((f"line {number}", cells) for number, cells in rows)
    return Examples.parsed(str(path), lines, lambda cells: _parse_cells(cells, separator, columns))


def _table(path: Path, separator: str) -> list[tuple[int, list[str]]]:
    """The first line and the cells of the header and of each row; bytes that are not UTF-8 are surrogates in them."""
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # 131,072 characters by default
    text = io.StringIO(_content(path).decode("utf-8", "surrogateescape"), newline="\n")
    line, rows, reader = 1, [], csv.reader(text, delimiter=separator, strict=True)
    try:
        for cells in reader:
            if cells:
                rows.append((line, cells))
            line = reader.line_num + 1
    except csv.Error as error:
        raise ConfigError(
            f"{path}: line {line} is not CSV: {error}; quote a text with quotes in it, and double them"
        ) from error
    return rows


def _parse_cells(cells: list[str], separator: str, columns: list[str]) -> Example:
    for cell in cells:
        try:
            cell.encode("utf-8")
        except UnicodeEncodeError as error:
            shown = cell[:20].encode(errors="surrogateescape").decode(errors="replace")
            raise BatchError(
                f"is not UTF-8: at character {error.start + 1} of {shown!r}; {UTF8_FIX}"
            ) from error
    if [cell.removeprefix("\ufeff") for cell in cells] == columns:
        raise BatchError(
            "repeats the header, as in files that were joined; remove it, or name each file as a source"
        )
    if len(cells) < len(columns):
        raise BatchError(f"has no cell for the column {columns[len(cells)]!r}")
    if len(cells) > len(columns):
        raise BatchError(
            f"has {len(cells)} cells for {len(columns)} columns: {cells[len(columns)]!r} comes after the "
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
