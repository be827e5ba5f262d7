"""Metrics in Trackio, where it is installed and the recipe asks for it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from core_rl.errors import ConfigError
from core_rl_trainer.logs.config import TrackioSection
from core_rl_trainer.logs.wandb_log import run_identifier

__all__ = ["TrackioBoard", "require_trackio"]

IDENTIFIER = ".trackio-run"
"""The file with the end of the run's name there, so that a resumed run is the same run."""


def require_trackio(section: TrackioSection | None) -> None:
    """Raise `ConfigError` where there is a ``section`` and Trackio is not installed."""
    if section is not None:
        _load()


class TrackioBoard:
    """Shows the rows of ``metrics.jsonl``. Steps that come again after an interruption are shown again.

    Trackio prints the place of its dashboard, which goes to stderr here.
    """

    def __init__(self, section: TrackioSection, directory: Path, config: Mapping[str, Any]) -> None:
        self._trackio = _load()
        name = section.name or f"{directory.name}-{run_identifier(directory / IDENTIFIER)}"
        with redirect_stdout(sys.stderr):
            self._trackio.init(
                project=section.project,
                name=name,
                group=section.group,
                space_id=section.space_id,
                config=dict(config),
                resume="allow",
                embed=False,
            )

    def write(self, row: Mapping[str, float | None]) -> None:
        step = row["step"]
        values = {name: value for name, value in row.items() if name != "step" and value is not None}
        self._trackio.log(values, step=None if step is None else int(step))

    def close(self) -> None:
        with redirect_stdout(sys.stderr):
            self._trackio.finish()


def _load() -> Any:
    try:
        import trackio
    except ImportError as error:
        raise ConfigError(
            "the recipe has a section 'trackio', and Trackio is not installed: pip install trackio, or remove the "
            "section"
        ) from error
    return trackio
