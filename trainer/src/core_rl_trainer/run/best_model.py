"""The model of the best evaluation of a run."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from core_rl.errors import ConfigError
from core_rl_trainer.recipe.sections import KeepBest


class BestModel:
    """Keeps it in ``root/step-00000010`` in Hugging Face format; ``link`` leads there.

    A newer one replaces an older one only after a checkpoint has recorded it (`prune`). A run that resumes from an
    earlier checkpoint has the model that it had then; ``recorded`` is the record of that checkpoint.
    """

    def __init__(
        self, rule: KeepBest | None, root: Path, link: Path, recorded: Mapping[str, Any] | None
    ) -> None:
        self._rule = rule
        self._root = root
        self._link = link
        self._best = dict(recorded) if recorded is not None else None
        self.prune()

    def state_dict(self) -> dict[str, Any] | None:
        """Step, metric, its value, and the model's place in the run's directory; None where there is none yet."""
        return self._best

    def offer(self, step: int, metrics: Mapping[str, float], save: Callable[[Path], None]) -> None:
        """Keep the model of ``step``, which ``save`` writes, if no earlier evaluation was as good.

        Raises `ConfigError` for a metric that evaluations do not have. A value that is not finite is not good.
        """
        rule = self._rule
        if rule is None:
            return
        if rule.metric not in metrics:
            raise ConfigError(
                f"keep_best.metric = {rule.metric!r}: evaluations of this run have {', '.join(sorted(metrics))}"
            )
        value = metrics[rule.metric]
        sign = 1 if rule.mode == "max" else -1
        best = -math.inf if self._best is None else sign * self._best["value"]
        if not math.isfinite(value) or sign * value <= best:
            return
        path = self._root / f"step-{step:08d}"
        self._root.mkdir(exist_ok=True)
        save(path)
        place = f"{self._root.name}/{path.name}"
        self._best = {"step": step, "metric": rule.metric, "value": value, "model": place}
        self._update_link()

    def prune(self) -> None:
        """Remove all models but the best; called when a checkpoint holds `state_dict`."""
        best = Path(self._best["model"]).name if self._best is not None else None
        for path in self._root.iterdir() if self._root.is_dir() else ():
            if path.name != best:
                shutil.rmtree(path)
        self._update_link()

    def _update_link(self) -> None:
        if self._best is None:
            self._link.unlink(missing_ok=True)
            return
        temporary = self._link.with_name(f".{self._link.name}.tmp")
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(Path(self._root.name, Path(self._best["model"]).name))
        temporary.replace(self._link)
