"""Local directories of models: ``model.path`` is one, or the id of a model on the Hugging Face Hub."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TypeVar

from core_rl.config.engine import EngineConfig
from core_rl.config.paths import HUB_ID, absolute_path
from core_rl.errors import ConfigError

ConfigT = TypeVar("ConfigT", bound=EngineConfig)

FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]
"""Weights, configs and tokenizers."""
OTHER_FILES = ["*/*", "consolidated*"]
"""Other formats of the same weights, such as ``onnx/`` and ``consolidated.safetensors``."""
SNAPSHOT = re.compile(r"(?:^|/)models--(?P<name>[\w.-]+)/snapshots/(?P<revision>[^/]+)/?$")
"""The directory of a model in the cache of ``huggingface_hub``."""


def with_local_model(config: ConfigT, local_files_only: bool = False) -> ConfigT:
    """``config`` with `local_model_path` of its ``model.path``."""
    if config.model.path is None:
        return config
    path = local_model_path(config.model.path, local_files_only)
    return config.model_copy(update={"model": config.model.model_copy(update={"path": path})})


def hub_source(path: str | None) -> tuple[str, str] | tuple[None, None]:
    """Hub id and commit of the model in the directory ``path``; None twice for other directories.

    The ``_name_or_path`` in its config would be the model that its weights were trained from.
    """
    snapshot = SNAPSHOT.search(os.path.realpath(path)) if path else None
    return (snapshot["name"].replace("--", "/", 1), snapshot["revision"]) if snapshot else (None, None)


def local_model_path(path: str, local_files_only: bool = False, field: str = "model.path") -> str:
    """The directory of a model, which ``path`` names itself or by a Hub id ``organization/name[@revision]``.

    A model of the Hub is downloaded into the cache of ``huggingface_hub``, for which ``HF_HOME``, ``HF_ENDPOINT``
    and ``HF_HUB_OFFLINE`` count; with ``local_files_only`` it must be there. Raises `ConfigError` about
    ``field`` for a model that is not found.
    """
    try:
        directory, hub_id = Path(absolute_path(path)), HUB_ID.fullmatch(path)
    except ValueError as error:
        raise ConfigError(f"{field} = {path!r}: {error}") from error
    if not directory.is_dir():
        if hub_id is None:
            raise ConfigError(
                f"{field} = {path!r}: no such directory, and no Hub id of the form 'organization/name[@revision]'; "
                "name a Hugging Face model directory or a model of the Hub"
            )
        subject = f"{field} = {path!r}: no such directory, and"
        directory = Path(_download(hub_id["name"], hub_id["revision"], local_files_only, subject))
    require_config(directory, f"{field} = {path!r}")
    return str(directory)


def require_config(directory: Path, subject: str) -> None:
    """Raise `ConfigError` that begins with ``subject`` for a ``directory`` without a model's config."""
    if (directory / "config.json").is_file():
        return
    if (directory / "adapter_config.json").is_file():
        raise ConfigError(
            f"{subject} holds an adapter alone; set model.lora.path to it, and model.path to its base"
        )
    inner = [str(file.parent) for depth in ("*", "*/*") for file in directory.glob(f"{depth}/config.json")]
    fix = f"name {' or '.join(sorted(inner)[:3])}" if inner else "name a Hugging Face model directory"
    raise ConfigError(f"{subject} holds no config.json; {fix}")


def _download(name: str, revision: str | None, local_files_only: bool, subject: str) -> str:
    import huggingface_hub  # heavy, and most paths are directories
    from huggingface_hub import errors

    try:
        return huggingface_hub.snapshot_download(
            name,
            revision=revision,
            local_files_only=local_files_only,
            allow_patterns=FILES,
            ignore_patterns=OTHER_FILES,
        )
    except (OSError, ValueError, errors.HTTPError) as error:  # type: ignore[attr-defined]  # httpx's, not exported
        reasons = {
            errors.RevisionNotFoundError: f"the Hub has no revision {revision!r} of {name!r}; name a branch, a tag or "
            "a commit of it",
            errors.GatedRepoError: f"{name!r} on the Hub is gated; request access on its page, and log in with "
            "`hf auth login`",
            errors.RepositoryNotFoundError: f"the Hub has no model {name!r} that you may read; check the name, or log "
            "in with `hf auth login`",
            errors.HFValidationError: f"{name!r} is no valid Hub id; write 'organization/name[@revision]'",
            errors.LocalEntryNotFoundError: f"the local cache has no complete copy of {name!r} and the Hub is not "
            "reached; connect to the network, unset HF_HUB_OFFLINE, or name a directory",
        }
        first_line = str(error).partition("\n")[0]
        fallback = f"the download of {name!r} failed with {type(error).__name__}: {first_line}"
        reason = next((text for kind, text in reasons.items() if isinstance(error, kind)), fallback)
        raise ConfigError(f"{subject} {reason}") from error
