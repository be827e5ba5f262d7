"""Sources of examples: files, directories and datasets of the Hub."""

from __future__ import annotations

import glob
import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from core_rl.checkpoint.model_files import is_lfs_pointer, some
from core_rl.config.paths import HUB_ID
from core_rl.errors import BatchError, ConfigError
from core_rl_trainer.data.config import DataSource
from core_rl_trainer.data.examples import Example, Examples, joined
from core_rl_trainer.data.plain import WrittenFloat, json_text
from core_rl_trainer.data.text_files import JSON_SUFFIXES, SEPARATORS, data_suffix, read_csv, read_json

TABLE_FILES = {".parquet": "parquet", ".arrow": "arrow"}
"""The builder of ``datasets`` that reads a file, by suffix."""
DESCRIPTIONS = ("config.json", "dataset_info.json", "dataset_infos.json")
"""Files about a dataset, without examples."""
OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
OFF = ("", "0", "false", "no", "off")
SHORT_FLOATS = ("float16", "float32")
"""Types whose values have fewer digits than a Python float."""


def _rows(origin: str, table: Any) -> Examples:
    """The rows of a ``datasets.Dataset``."""
    _keep_encoded(table.info.features)
    labels = {name: feature for name, feature in table.features.items() if "ClassLabel" in str(feature)}
    types = {name: str(getattr(feature, "dtype", "")) for name, feature in table.features.items()}

    def read(index: int) -> Example:
        try:
            row = table[index]
        except (ArithmeticError, ValueError) as error:
            raise BatchError(f"has {_unreadable(table, index)}: {error}") from error
        row |= {name: _named(row[name], feature) for name, feature in labels.items()}
        return {name: _plain(value, types[name]) for name, value in row.items()}

    return Examples.parsed(origin, ((f"row {index + 1}", index) for index in range(len(table))), read)


def _unreadable(table: Any, index: int) -> str:
    """The first value of a row that Python cannot hold, such as a text that is not UTF-8."""
    for name in table.column_names:
        try:
            table.select_columns(name)[index]
        except (ArithmeticError, ValueError):
            break
    return f"a value in {name!r} that cannot be read"


def _keep_encoded(features: Any) -> None:
    """Have images, sounds and other files given as ``{bytes, path}``, wherever in ``features`` of a table they are."""
    if getattr(features, "decode", None) is True:
        features.decode = False
    inner = features.values() if isinstance(features, dict) else [getattr(features, "feature", None)]
    for feature in features if isinstance(features, list) else inner:
        if feature is not None:
            _keep_encoded(feature)


def _named(value: Any, feature: Any) -> Any:
    """``value`` with the names of the classes that it has by number; None for others, as -1."""
    if callable(name_of := getattr(feature, "int2str", None)):
        return name_of(value) if value in range(feature.num_classes) else None
    if isinstance(value, list):
        inner = feature[0] if isinstance(feature, list) else feature.feature
        return [_named(item, inner) for item in value]
    if isinstance(value, dict) and isinstance(feature, dict):
        return {name: _named(item, feature[name]) for name, item in value.items()}
    return value


def _plain(value: Any, column_type: str) -> Any:
    """``value`` of a column as JSON would have it."""
    if isinstance(value, Decimal):
        return WrittenFloat(format(value, "f"))
    if column_type in SHORT_FLOATS and isinstance(value, float):
        return float(str(np.dtype(column_type).type(value)))  # 0.1, and not 0.10000000149011612
    if isinstance(value, list) and all(isinstance(item, dict) for item in value):
        return [_without_nulls(item) for item in value]
    return value


def _without_nulls(value: Any) -> Any:
    """``value`` without the nulls that a table adds to chat messages and tools for keys of other rows.

    The ``content`` of a message stays: null next to calls of tools is its value.
    """
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        name: _without_nulls(inner)
        for name, inner in value.items()
        if inner is not None or (name == "content" and "role" in value)
    }


def read_table_file(path: Path, builder: str) -> Examples:
    """Read a file of the `TABLE_FILES`. Raises `ConfigError` for another content."""
    if path.suffix.lower() not in TABLE_FILES:
        raise ConfigError(f"{path}: compressed {builder} files are not read; decompress it")
    datasets = _datasets()
    if not path.stat().st_size:
        raise ConfigError(f"{path} is empty; write examples into it")
    try:
        table = datasets.load_dataset(builder, data_files=glob.escape(str(path)), split="train")
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        reason = str(error.__cause__ or error).partition("\n")[0]
        if "corresponds to no data" in reason:
            raise ConfigError(f"{path} has no rows; write examples into it") from error
        fix = _remedy(reason, "check what wrote it")
        raise ConfigError(f"{path} cannot be read as {builder}: {reason}; {fix}") from error
    return _rows(str(path), table)


def _remedy(reason: str, otherwise: str) -> str:
    """That of an error of ``datasets``."""
    return "write that column as JSON text" if "datasets dtype" in reason else otherwise


def read_directory(path: Path, config: str | None, split: str | None, default_split: str | None) -> Examples:
    """A directory of ``datasets.save_to_disk``, or a copy of a dataset of the Hub; `ConfigError` when it is neither."""
    datasets = _datasets()
    try:
        saved = (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()
        if not saved and (files := _json_files(datasets, path, config)):
            names = _select_split(str(path), files, split, default_split)
            return joined(str(path), [read_json(Path(name)) for name in names])
        table = datasets.load_from_disk(str(path)) if saved else _load_tables(datasets, str(path), config)
    except (OSError, ValueError, datasets.builder.DatasetGenerationError) as error:
        reason = str(error).partition("\n")[0]
        bracket = "rename it: 'datasets' takes brackets as a pattern" if "[" in str(path) else None
        fix = _remedy(reason, bracket or "name another one")
        raise ConfigError(
            f"{path} holds no dataset of datasets.save_to_disk, and no files of a dataset: {reason}; {fix}"
        ) from error
    return _rows(str(path), _select_split(str(path), table, split, default_split))


def _json_files(datasets: ModuleType, path: Path, config: str | None) -> dict[str, list[str]]:
    """The files of each split, where they are JSON: a table would not keep the digits of their numbers.

    Raises `ConfigError` for further files of examples, which ``datasets`` leaves out unless its README names files.
    """
    builder = datasets.load_dataset_builder(str(path), config)
    files = {str(split): list(names) for split, names in (builder.config.data_files or {}).items()}
    card = path / "README.md"
    if not card.is_file() or "data_files" not in card.read_text(errors="replace"):
        taken = {Path(name).resolve() for names in files.values() for name in names}
        left = [str(file.relative_to(path)) for file in _example_files(path) if file.resolve() not in taken]
        if left:
            raise ConfigError(
                f"{path}: {some(left)} would not be read, beside the files of the format "
                f"{builder.name!r}; name each file as a source of its own, or move it out of the directory"
            )
    return files if builder.name == "json" else {}


def _example_files(path: Path) -> Iterator[Path]:
    """The files in a directory with the suffix of a format; without hidden and descriptive ones."""
    suffixes = (*TABLE_FILES, *SEPARATORS, *JSON_SUFFIXES)
    for file in sorted(path.rglob("*")):
        hidden = any(part.startswith((".", "__")) for part in file.relative_to(path).parts)
        if data_suffix(file) in suffixes and not hidden and file.is_file() and file.name not in DESCRIPTIONS:
            yield file


def _load_tables(datasets: ModuleType, name: str, config: str | None, revision: str | None = None) -> Any:
    """All splits of a dataset; cells of CSV files stay texts."""
    builder = datasets.load_dataset_builder(name, config, revision=revision)
    tables = datasets.load_dataset(name, config, revision=revision)
    if not hasattr(builder.config, "keep_default_na"):
        return tables
    columns = next(iter(tables.values())).column_names  # whose types are guessed
    texts = datasets.Features({column: datasets.Value("string") for column in columns})
    return datasets.load_dataset(
        name, config, revision=revision, features=texts, keep_default_na=False, na_filter=False
    )


def _select_split(origin: str, tables: Any, split: str | None, default_split: str | None) -> Any:
    """The table or the files of a split; ``tables`` is a table, or several by split."""
    if not isinstance(tables, dict):
        if split is not None:
            raise ConfigError(f"{origin} holds one dataset without splits; leave split = {split!r} out")
        return tables
    name = split or (next(iter(tables)) if len(tables) == 1 else default_split)
    if name not in tables:
        problem = f"there is no split {split!r}" if split else "there are several splits"
        raise ConfigError(
            f"{origin}: {problem}; it has {', '.join(map(repr, tables))}. Set 'split' of the source to one of them"
        )
    return tables[name]


def _datasets() -> ModuleType:
    """The package ``datasets``, which takes a second to import, without progress bars and logged errors."""
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.get_logger("datasets.packaged_modules").setLevel("CRITICAL")  # it raises them as well
    module: ModuleType = datasets
    return module


def read_hub(
    name: str, revision: str | None, config: str | None, split: str | None, default_split: str | None
) -> Examples:
    """A dataset of the Hub, also from the cache of ``datasets`` or ``huggingface_hub``.

    ``HF_HOME``, ``HF_ENDPOINT``, ``HF_HUB_OFFLINE`` and ``HF_DATASETS_OFFLINE`` count. Raises `ConfigError` for a
    dataset, a config or a split that is not found.
    """
    from huggingface_hub import errors

    datasets = _datasets()
    try:
        tables = _load(datasets, name, revision, config)
    except (OSError, ValueError, errors.HTTPError) as error:  # type: ignore[attr-defined]  # httpx's, not exported
        raise ConfigError(_problem(name, revision, error)) from error
    origin = name if revision is None else f"{name}@{revision}"
    examples = _rows(origin, _select_split(origin, tables, split, default_split))
    total = hashlib.sha256()  # fingerprints of ``datasets`` depend on its cache as well
    for row in examples.rows:
        try:
            text = json_text(row.read())
        except BatchError as error:
            text = str(error)
        total.update(f"{text}\n".encode())
    return replace(examples, digest=total.hexdigest())


def _load(datasets: ModuleType, name: str, revision: str | None, config: str | None) -> Any:
    """All splits, from the Hub or a cache.

    Without a network, ``datasets`` takes the newest copy in its cache, whatever its revision. A revision is therefore
    looked for in the cache of ``huggingface_hub``, as is a dataset that was downloaded and never loaded.
    """
    from huggingface_hub import errors

    snapshot = _snapshot(name, revision)
    if _offline() and revision is not None:
        if snapshot is None:
            raise FileNotFoundError(f"{name}@{revision} is not in the cache")
        return _load_tables(datasets, snapshot, config)
    try:
        return _load_tables(datasets, name, config, revision)
    except (OSError, errors.HTTPError):  # type: ignore[attr-defined]
        if snapshot is None:
            raise
        return _load_tables(datasets, snapshot, config)


def _snapshot(name: str, revision: str | None) -> str | None:
    """The directory of a dataset in the cache of ``huggingface_hub``; None where it is not there."""
    import huggingface_hub

    try:
        return huggingface_hub.snapshot_download(
            name, repo_type="dataset", revision=revision, local_files_only=True
        )
    except (OSError, ValueError):
        return None


def _offline() -> list[str]:
    """The variables that forbid to use the network."""
    return [name for name in OFFLINE if os.environ.get(name, "").lower() not in OFF]


def _problem(name: str, revision: str | None, error: Exception) -> str:
    lines = str(error).splitlines() or [type(error).__name__]
    if lines[0].startswith(("Config name", "BuilderConfig")):
        return f"{name!r} on the Hub: {' '.join(lines[:2])}; set 'config' of the source"
    version = "" if revision is None else f" in revision {revision!r}"
    if offline := _offline():
        brought = "" if revision is None else f" --revision {revision}"
        return (
            f"{name!r}: there is no such file, and the local cache has no complete copy of a Hub dataset of this "
            f"name{version}, while {' and '.join(offline)} forbids the network. Unset that, name a file, or bring it "
            f"with `hf download --repo-type dataset {name}{brought}`"
        )
    return (
        f"{name!r}: there is no such file, and no Hub dataset of this name could be read{version}: {lines[0]}. Check "
        "the name and the network, or log in with `hf auth login`"
    )


DATA_FILE = re.compile(r"\.(jsonl?|ndjson|parquet|csv|tsv|txt|arrow|gz|bz2|xz|zst|zip)$", re.IGNORECASE)
"""Suffixes of files, which are no datasets of the Hub."""


def open_source(source: DataSource, default_split: str | None = None) -> Examples:
    """The examples of ``source``; ``default_split`` is taken of several where the source names none.

    Raises `ConfigError` for a missing source or an unknown type.
    """
    path, hub = Path(source.path), _hub_id(source)
    if hub is not None:
        return read_hub(hub["name"], hub["revision"], source.config, source.split, default_split)
    for file in data_files((source,)):
        if DATA_FILE.search(file.name) and is_lfs_pointer(file):
            raise ConfigError(f"{file}: is a pointer of Git LFS; run `git lfs pull` in its repository")
    if path.is_dir():
        return read_directory(path, source.config, source.split, default_split)
    if not path.is_file():
        raise ConfigError(f"{source.path!r}: there is no such file")
    for name, value in (("config", source.config), ("split", source.split)):
        if value is not None:
            raise ConfigError(
                f"{source.path!r} is no dataset of the Hub and has no {name}; leave {name} = {value!r} out"
            )
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
