"""Sources of examples: files, directories and datasets of the Hub."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from core_rl.config.paths import HUB_ID
from core_rl.errors import ConfigError
from core_rl_trainer.data.config import DataSource
from core_rl_trainer.data.examples import Examples
from core_rl_trainer.data.tables import TABLE_FILES, read_directory, read_hub, read_table_file
from core_rl_trainer.data.text_files import SEPARATORS, data_suffix, read_csv, read_json

DATA_FILE = re.compile(r"\.(jsonl?|ndjson|parquet|csv|tsv|txt|arrow|gz|bz2|xz|zst|zip)$", re.IGNORECASE)
"""Suffixes of files, which are no datasets of the Hub."""


def open_source(source: DataSource, default_split: str | None = None) -> Examples:
    """The examples of ``source``; ``default_split`` is taken of several where the source names none.

    Raises `ConfigError` for a missing source or an unknown type.
    """
    path, hub = Path(source.path), _hub_id(source)
    if hub is not None:
        return read_hub(hub["name"], hub["revision"], source.config, source.split, default_split)
    if path.is_dir():
        return read_directory(path, source.config, source.split, default_split)
    if not path.is_file():
        raise ConfigError(f"{source.path!r}: there is no such file")
    _refuse(source, "config", "split")
    suffix = data_suffix(path)
    if suffix in SEPARATORS:
        return read_csv(path, SEPARATORS[suffix])
    return read_table_file(path, TABLE_FILES[suffix]) if suffix in TABLE_FILES else read_json(path)


def is_hub_dataset(source: DataSource) -> bool:
    """Whether ``source`` is named like a dataset of the Hub, and is no file or directory."""
    return _hub_id(source) is not None


def is_missing(source: DataSource) -> bool:
    """Whether ``source`` is neither on the disk nor named like a dataset of the Hub."""
    return _hub_id(source) is None and not Path(source.path).exists()


def data_files(sources: tuple[DataSource, ...]) -> Iterator[Path]:
    """The local files that ``sources`` are read from; none for datasets of the Hub, which have revisions."""
    for source in sources:
        path = Path(source.path)
        if path.is_dir():
            yield from sorted(file for file in path.rglob("*") if file.is_file())
        elif path.is_file():
            yield path


def _hub_id(source: DataSource) -> re.Match[str] | None:
    if Path(source.path).exists() or DATA_FILE.search(source.path):
        return None
    return HUB_ID.fullmatch(source.path)


def _refuse(source: DataSource, *fields: str) -> None:
    """Raise `ConfigError` for a field that has no meaning for ``source``."""
    for name in fields:
        if (value := getattr(source, name)) is not None:
            raise ConfigError(
                f"{source.path!r} is no dataset of the Hub and has no {name}; leave {name} = {value!r} out"
            )
