"""CSV and TSV files, whose cells are texts: no cell is taken for a number, a truth value or a missing value."""

from __future__ import annotations

import csv
import sys
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING

from core_rl.errors import BatchError, ConfigError, raise_all
from core_rl_trainer.data.examples import Example, Examples
from core_rl_trainer.data.text_files import open_data

if TYPE_CHECKING:
    from _csv import Reader

__all__ = ["SEPARATORS", "CsvRows", "read_csv"]

SEPARATORS = {".csv": ",", ".tsv": "\t"}
"""By suffix."""
NAMES = {",": "a comma", "\t": "a tab", ";": "a semicolon", "|": "a vertical bar"}


def read_csv(path: Path, separator: str) -> Examples:
    """The rows of ``path`` after its header. Raises `ConfigError` for a file that is not CSV."""
    rows = CsvRows(str(path), open_data(path), separator)
    if not rows.columns:
        raise ConfigError(f"{path} is empty; write examples into it")
    raise_all(ConfigError, f"{path}: line 1", _header_problems(rows.columns, separator))
    if not len(rows):
        raise ConfigError(f"{path} has no rows; write examples into it")
    return rows


class CsvRows(Examples):
    """A CSV file, of which only the places of its rows are in memory. Empty lines do not count."""

    def __init__(self, origin: str, file: IO[bytes], separator: str) -> None:
        self.origin = origin
        self._file, self._separator = file, separator
        self._places, self._numbers = array("Q"), array("Q")
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
                    self._numbers.append(line)
                place, line = self._file.tell(), reader.line_num + 1
        except csv.Error as error:
            raise ConfigError(
                f"{self.origin}: line {line} is not CSV: {error}; quote a text with quotes in it, and double them"
            ) from error

    def _reader(self, errors: str) -> Reader:
        lines: Iterator[str] = (line.decode("utf-8", errors) for line in self._file)
        return csv.reader(lines, delimiter=self._separator, strict=True)

    def __len__(self) -> int:
        return len(self._places)

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

    def label(self, index: int) -> str:
        return f"line {self._numbers[index]}"


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
