"""Metrics in Weights & Biases, where a recipe has the section and the package is installed."""

from __future__ import annotations

import importlib
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from core_rl.config.base import Config
from core_rl.errors import ConfigError


class WandbSection(Config):
    """A run in Weights & Biases (``pip install wandb``), with the same values as ``metrics.jsonl``."""

    project: str = "core-rl"
    """The project there."""
    entity: str | None = None
    """Owner of the project; null for the default."""
    name: str | None = None
    """The run's name there; null for that of ``output_dir``."""
    group: str | None = None
    """Runs that belong together."""
    tags: tuple[str, ...] = ()
    """Words to find it by."""
    mode: Literal["online", "offline"] = "online"
    """``offline`` writes to ``output_dir/wandb``, for ``wandb sync``."""


class WandbBoard:
    """Shows the rows of ``metrics.jsonl``; ``step`` is the horizontal axis of all of them.

    Steps repeated after an interruption are shown again: Weights & Biases removes nothing.
    """

    def __init__(self, section: WandbSection, directory: Path, config: Mapping[str, Any]) -> None:
        wandb = load_wandb()
        try:
            self._run = wandb.init(
                project=section.project,
                entity=section.entity,
                name=section.name or directory.name,
                group=section.group,
                tags=section.tags,
                mode=section.mode,
                id=_run_id(directory / ".wandb-run"),
                resume="allow",
                dir=str(directory),
                config=dict(config),
                settings=wandb.Settings(console="off"),
            )
        except wandb.errors.Error as error:
            raise ConfigError(
                f"wandb: {error}; log in with 'wandb login', or set wandb.mode=offline"
            ) from error
        self._run.define_metric("*", step_metric="step")

    def write(self, row: Mapping[str, float | None]) -> None:
        self._run.log({name: value for name, value in row.items() if value is not None})

    def close(self) -> None:
        self._run.finish()


def load_wandb() -> Any:
    """The package of Weights & Biases. Raises `ConfigError` where it is not installed."""
    try:
        return importlib.import_module("wandb")
    except ImportError as error:
        raise ConfigError(
            "the recipe has a section 'wandb', and Weights & Biases is not installed: pip install wandb, or remove the "
            "section"
        ) from error


def _run_id(path: Path) -> str:
    """The identifier of a run in the file ``path``, written once: a resumed run keeps it."""
    if not path.is_file():
        path.write_text(uuid.uuid4().hex[:8], encoding="utf-8")
    return path.read_text(encoding="utf-8")
