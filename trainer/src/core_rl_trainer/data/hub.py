"""Datasets of the Hugging Face Hub."""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

from core_rl.errors import ConfigError
from core_rl_trainer.data.examples import Examples
from core_rl_trainer.data.tables import TableExamples, chosen_split, import_datasets, load_tables

__all__ = ["read_hub"]

OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
OFF = ("", "0", "false", "no", "off")


def read_hub(
    name: str, revision: str | None, config: str | None, split: str | None, default_split: str | None
) -> Examples:
    """A dataset of the Hub, from the cache of ``datasets`` or of ``huggingface_hub`` where it is in one of them.

    ``HF_HOME``, ``HF_ENDPOINT``, ``HF_HUB_OFFLINE`` and ``HF_DATASETS_OFFLINE`` count. Raises `ConfigError` for a
    dataset, a config or a split that is not found.
    """
    from huggingface_hub import errors

    datasets = import_datasets(f"{name!r} is no file, and a dataset of the Hub")
    try:
        tables = _load(datasets, name, revision, config)
    except (OSError, ValueError, errors.HTTPError) as error:  # type: ignore[attr-defined]  # httpx's, not exported
        raise ConfigError(_problem(name, revision, error)) from error
    origin = name if revision is None else f"{name}@{revision}"
    return TableExamples(origin, chosen_split(origin, tables, split, default_split))


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
        return load_tables(datasets, snapshot, config)
    try:
        return load_tables(datasets, name, config, revision)
    except (OSError, errors.HTTPError):  # type: ignore[attr-defined]
        if snapshot is None:
            raise
        return load_tables(datasets, snapshot, config)


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
    """The message for a dataset that cannot be read."""
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
