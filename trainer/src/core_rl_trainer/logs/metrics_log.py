"""JSONL files of a run, and its metrics: a row a step, also in TensorBoard and Weights & Biases."""

from __future__ import annotations

import importlib
import json
import logging
import math
import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from core_rl.config.base import Config
from core_rl.errors import CheckpointError, ConfigError
from core_rl_trainer.data.plain import json_text
from core_rl_trainer.outputs.run_files import METRICS, replace_text

logger = logging.getLogger(__name__)

Row = dict[str, Any]


def read_steps(path: Path) -> list[Row]:
    """The complete rows of such a file; lines after a damaged one (a killed writer's) are left out."""
    rows: list[Row] = []
    if not path.is_file():
        return rows
    for line in path.read_bytes().splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            break
        rows.append(row)
    return rows


class StepLog:
    """Appends rows, each with its ``step``, to ``path``, continuing after ``step`` (-1: from the start).

    Rows of later steps, which a run wrote before it was interrupted, are removed: those steps come again.
    """

    def __init__(self, path: Path, step: int) -> None:
        self.rows = [row for row in read_steps(path) if (row.get("step") or 0) <= step]
        replace_text(path, "".join(_line(row) for row in self.rows))
        self._file = path.open("a", encoding="utf-8")

    def append(self, row: Row) -> None:
        """Add a row of JSON. Raises `CheckpointError` when it cannot be written, for example on a full disk."""
        self.rows.append(row)
        try:
            self._file.write(_line(row))
            self._file.flush()
        except OSError as error:
            raise CheckpointError(f"cannot write {self._file.name}: {error.strerror}") from error

    def sync(self) -> None:
        """Return when all rows are on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _line(row: Mapping[str, Any]) -> str:
    return json_text(row) + "\n"


class TensorBoard:
    """Event files in ``directory``, continuing after ``step``; an `ImportError` where TensorBoard is not installed."""

    def __init__(self, directory: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Events of later steps, from before an interruption, are hidden.
        self._writer = SummaryWriter(str(directory), purge_step=step + 1)

    def write(self, row: Mapping[str, float | None]) -> None:
        """Show a row; None stands for a number that is not finite."""
        for name, value in row.items():
            if name != "step":
                self._writer.add_scalar(name, math.nan if value is None else value, int(row["step"] or 0))
        self._writer.flush()  # a checkpoint may follow, after which this row does not come again

    def close(self) -> None:
        self._writer.close()


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
            path = directory / ".wandb-run"  # a resumed run keeps its identifier
            if not path.is_file():
                path.write_text(uuid.uuid4().hex[:8], encoding="utf-8")
            self._run = wandb.init(
                project=section.project,
                entity=section.entity,
                name=section.name or directory.name,
                group=section.group,
                tags=section.tags,
                mode=section.mode,
                id=path.read_text(encoding="utf-8"),
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


class MetricsLog(StepLog):
    """Appends to ``metrics.jsonl``, ``tensorboard/`` and ``boards``, continuing after ``step``. See `StepLog`."""

    def __init__(self, directory: Path, step: int, boards: Sequence[WandbBoard] = ()) -> None:
        super().__init__(directory / METRICS, step)
        self._boards: list[TensorBoard | WandbBoard] = [*boards]
        try:
            self._boards.append(TensorBoard(directory / "tensorboard", step))
        except ImportError:
            logger.warning(
                "TensorBoard is not installed, metrics go to metrics.jsonl only; pip install tensorboard"
            )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the row of ``step``; numbers that are not finite become null, since JSON has none.

        Raises `CheckpointError` when it cannot be written, for example on a full disk.
        """
        row: Row = {"step": step}
        row |= {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self.append(row)
        for board in self._boards:
            board.write(row)

    def close(self) -> None:
        super().close()
        for board in self._boards:
            board.close()
