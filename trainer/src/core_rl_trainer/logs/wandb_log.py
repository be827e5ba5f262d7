"""Metrics in Weights & Biases, where it is installed and the recipe asks for it."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from core_rl.errors import ConfigError
from core_rl_trainer.logs.config import WandbSection

__all__ = ["WandbBoard", "require_wandb", "run_identifier"]

IDENTIFIER = ".wandb-run"
"""The file that holds the run's identifier, so that a run that resumes is the same run there."""


def require_wandb(section: WandbSection | None) -> None:
    """Raise `ConfigError` where there is a ``section`` and Weights & Biases is not installed."""
    if section is not None:
        _load()


class WandbBoard:
    """Shows the rows of ``metrics.jsonl``; ``step`` is the horizontal axis of all of them.

    Steps that come again after an interruption are shown again: Weights & Biases removes nothing.
    """

    def __init__(self, section: WandbSection, directory: Path, config: Mapping[str, Any]) -> None:
        wandb = _load()
        try:
            self._run = wandb.init(
                project=section.project,
                entity=section.entity,
                name=section.name or directory.name,
                group=section.group,
                tags=section.tags,
                mode=section.mode,
                id=run_identifier(directory / IDENTIFIER),
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


def _load() -> Any:
    try:
        import wandb
    except ImportError as error:
        raise ConfigError(
            "the recipe has a section 'wandb', and Weights & Biases is not installed: pip install wandb, or remove the "
            "section"
        ) from error
    return wandb


def run_identifier(path: Path) -> str:
    """The identifier of a run in the file ``path``; a new one where there is none."""
    if not path.is_file():
        path.write_text(uuid.uuid4().hex[:8], encoding="utf-8")
    return path.read_text(encoding="utf-8")
