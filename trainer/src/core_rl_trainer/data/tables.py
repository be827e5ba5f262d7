"""Tables that the package ``datasets`` reads: parquet, CSV, saved datasets, and datasets of the Hub.

``datasets`` keeps them in files that are mapped into memory, so that they may be larger than it.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType
from typing import Any

from core_rl.errors import ConfigError
from core_rl_trainer.data.examples import Example, Examples

__all__ = ["TABLE_FILES", "TableExamples", "read_directory", "read_hub", "read_table_file"]

TABLE_FILES = {".parquet": ("parquet", {}), ".csv": ("csv", {}), ".tsv": ("csv", {"sep": "\t"})}
"""By suffix: the builder of ``datasets`` that reads such a file, and its settings."""


class TableExamples(Examples):
    """The rows of a ``datasets.Dataset``."""

    def __init__(self, origin: str, table: Any) -> None:
        self.origin = origin
        self._table = table

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> Example:
        return {name: _without_nulls(value) for name, value in self._table[index].items()}


def _without_nulls(value: Any) -> Any:
    """``value`` without what a table adds to chat messages: null for each key that other messages have."""
    if isinstance(value, list) and all(isinstance(item, dict) for item in value):
        return [{name: inner for name, inner in item.items() if inner is not None} for item in value]
    return value


def read_table_file(path: Path) -> Examples:
    """A file of one of the `TABLE_FILES`. Raises `ConfigError` when it is something else."""
    datasets = _import(f"{path} is a {path.suffix} file")
    builder, settings = TABLE_FILES[path.suffix]
    if not path.stat().st_size:
        raise ConfigError(f"{path} is empty; write examples into it")
    try:
        table = datasets.load_dataset(builder, data_files=str(path), split="train", **settings)
    except (
        datasets.exceptions.DatasetsError,
        datasets.builder.DatasetGenerationError,
        OSError,
        ValueError,
    ) as error:
        reason = str(error.__cause__ or error).partition("\n")[0]
        raise ConfigError(f"{path} cannot be read as {builder}: {reason}; check what wrote it") from error
    return TableExamples(str(path), table)


def read_directory(path: Path, split: str | None, default_split: str | None) -> Examples:
    """A directory that ``datasets.save_to_disk`` wrote. Raises `ConfigError` when it is none."""
    datasets = _import(f"{path} is a directory")
    try:
        table = datasets.load_from_disk(str(path))
    except (FileNotFoundError, ValueError) as error:
        raise ConfigError(f"{path} holds no dataset of datasets.save_to_disk: {error}") from error
    return TableExamples(str(path), _chosen(str(path), table, split, default_split))


def read_hub(
    name: str, revision: str | None, config: str | None, split: str | None, default_split: str | None
) -> Examples:
    """A dataset of the Hub, from the cache of ``datasets`` or of ``huggingface_hub`` where it is in one of them.

    ``HF_HOME``, ``HF_ENDPOINT``, ``HF_HUB_OFFLINE`` and ``HF_DATASETS_OFFLINE`` count. Raises `ConfigError` for a
    dataset, a config or a split that is not found.
    """
    datasets = _import(f"{name!r} is no file, and a dataset of the Hub")
    try:
        tables = datasets.load_dataset(name, config, revision=revision)
    except (OSError, ValueError) as error:  # among them all of `datasets`, and of the Hub
        snapshot = _snapshot(name, revision)
        if snapshot is None:
            raise ConfigError(_hub_problem(name, revision, error)) from error
        tables = datasets.load_dataset(snapshot, config)
    origin = name if revision is None else f"{name}@{revision}"
    return TableExamples(origin, _chosen(origin, tables, split, default_split))


def _snapshot(name: str, revision: str | None) -> str | None:
    """The directory of a dataset that ``hf download`` brought; None where there is none."""
    import huggingface_hub

    try:
        return huggingface_hub.snapshot_download(
            name, repo_type="dataset", revision=revision, local_files_only=True
        )
    except (OSError, ValueError):
        return None


def _hub_problem(name: str, revision: str | None, error: Exception) -> str:
    """The message for a dataset that cannot be read."""
    first_line = str(error).partition("\n")[0]
    offline = [key for key in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE") if os.environ.get(key)]
    if "config" in first_line.lower():
        return f"{name!r} on the Hub: {first_line}; set 'config' of the source"
    if offline:
        return (
            f"{name!r}: there is no such file, and the local cache has no complete copy of a Hub dataset of this name, "
            f"while {' and '.join(offline)} forbids to ask for it; unset that, or name a file"
        )
    version = "" if revision is None else f" in revision {revision!r}"
    return (
        f"{name!r}: there is no such file, and no Hub dataset of this name could be read{version}: {first_line}; check "
        "the name and the network, or log in with `hf auth login`"
    )


def _chosen(origin: str, found: Any, split: str | None, default_split: str | None) -> Any:
    """The table of a split; ``found`` is a table, or several by split."""
    if not isinstance(found, dict):
        if split is not None:
            raise ConfigError(f"{origin} holds one dataset without splits; leave split = {split!r} out")
        return found
    wanted = split or (next(iter(found)) if len(found) == 1 else default_split)
    if wanted not in found:
        begun = f"there is no split {split!r}" if split else "there are several splits"
        raise ConfigError(
            f"{origin}: {begun}; it has {', '.join(map(repr, found))}. Set 'split' of the source to one of them"
        )
    return found[wanted]


def _import(subject: str) -> ModuleType:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"{subject}, which the package 'datasets' reads: pip install 'core-rl[data]', or name a JSONL file"
        ) from error
    datasets.disable_progress_bars()
    module: ModuleType = datasets
    return module
