"""The records of a run: metrics, samples of rollouts, and its page."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Self

from core_rl.errors import CheckpointError, RunStopped
from core_rl.pages import svg_document
from core_rl_trainer.logs.metrics_log import MetricsLog, StepLog, WandbBoard
from core_rl_trainer.logs.page import RunPage, Status, main_chart
from core_rl_trainer.logs.samples import TextSample
from core_rl_trainer.run.run_directory import RunDirectory

logger = logging.getLogger(__name__)


class RunRecords:
    """All that a person reads of a run, continuing after ``step`` (-1: from the start); ``boards`` get metrics."""

    def __init__(
        self, directory: RunDirectory, step: int, page: RunPage, boards: Sequence[WandbBoard] = ()
    ) -> None:
        self._directory = directory
        self._metrics = MetricsLog(directory.path, step, boards)
        self._samples = StepLog(directory.path / "samples.jsonl", step)
        self._page = page
        self.best: Mapping[str, Any] | None = None
        """The best model so far, for the page."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is not None:
            try:
                text = str(error) if isinstance(error, RunStopped) else f"{type(error).__name__}: {error}"
                self.draw("stopped", text.rstrip(": "))
            except CheckpointError as second:
                logger.warning("the page of the run could not be written: %s", second)
        self._samples.close()
        self._metrics.close()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._metrics.write(step, metrics)

    def add_samples(self, step: int, samples: Sequence[TextSample]) -> None:
        """Add completions or examples of the evaluation after ``step``."""
        for sample in samples:
            self._samples.append({"step": step, **asdict(sample)})

    def sync(self) -> None:
        """Return when all rows are on the disk; called before a checkpoint counts on them."""
        self._metrics.sync()
        self._samples.sync()

    def draw(self, status: Status = "running", problem: str = "") -> None:
        """Write the page, the picture and the status as of now."""
        text = self._page.render(
            self._metrics.rows,
            self._samples.rows,
            status=status,
            best=self.best,
            problem=problem,
            restarts=self._directory.restarts(),
        )
        chart = main_chart(self._metrics.rows)
        self._directory.write_page(text, svg_document(chart) if chart else None)
        self._directory.write_status(status, problem)
