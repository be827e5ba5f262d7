"""The directory of a run: its files, its lock, and the recipe that it belongs to."""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from core_rl.checkpoint.run import RunCheckpoints
from core_rl.errors import ConfigError, raise_all
from core_rl_trainer.recipe.recipe import Recipe, differing_fields

__all__ = ["RunDirectory", "open_run_directory"]

RECIPE, RESULT, PAGE, PICTURE, LOCK = "recipe.yaml", "result.json", "index.html", "reward.svg", ".lock"
OWNED = (
    RECIPE,
    RESULT,
    "metrics.jsonl",
    "samples.jsonl",
    "tensorboard",
    "wandb",
    ".wandb-run",
    "checkpoints",
    "weights",
    "model",
    "best",
    "best_model",
    PICTURE,
    PAGE,
    "reference",
)


@contextmanager
def open_run_directory(recipe: Recipe) -> Iterator[RunDirectory]:
    """``recipe.output_dir``, for this process and this recipe alone.

    Raises `ConfigError` when another process is at work there, and one that names the differing fields
    when another recipe's run is there.
    """
    path = recipe.directory
    path.mkdir(parents=True, exist_ok=True)
    with (path / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with the process, however it ends
        except BlockingIOError as error:
            raise ConfigError(
                f"another process is at work in {path}; wait for its end, or set output_dir"
            ) from error
        yield RunDirectory(recipe)


class RunDirectory:
    """The files of ``recipe.output_dir``; made by `open_run_directory`."""

    def __init__(self, recipe: Recipe) -> None:
        self.path = recipe.directory
        if recipe.fresh:
            self._clear()
        self._claim(recipe.model_dump(mode="json", exclude={"fresh"}))
        self.checkpoints = RunCheckpoints(self.path / "checkpoints", recipe.keep)

    @property
    def weights(self) -> Path:
        """The directory through which weights go to the rollout engine."""
        return self.path / "weights"

    @property
    def model(self) -> Path:
        """The trained model in Hugging Face format."""
        return self.path / "model"

    @property
    def picture(self) -> Path:
        """The rewards, or the losses, over the steps."""
        return self.path / PICTURE

    @property
    def page(self) -> Path:
        """The page that shows the run."""
        return self.path / PAGE

    @property
    def best(self) -> Path:
        """The directory with the model of the best evaluation."""
        return self.path / "best"

    @property
    def best_model(self) -> Path:
        """A link to that model."""
        return self.path / "best_model"

    def reference(self, name: str) -> Path:
        """The file of the reference's log-probs of the training data (``train``) or the evaluation data (``eval``)."""
        directory = self.path / "reference"
        directory.mkdir(exist_ok=True)
        return directory / f"{name}.safetensors"

    def result(self) -> dict[str, Any] | None:
        """The result of a finished run; None before."""
        path = self.path / RESULT
        if not path.is_file():
            return None
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found

    def write_page(self, page: str, picture: str | None) -> None:
        """Replace the page and the picture; nobody sees half of one."""
        self._write(PAGE, page)
        if picture is not None:
            self._write(PICTURE, picture)

    def finish(self, result: dict[str, Any]) -> None:
        """Record that the run is complete; the last thing that a run does."""
        self._write(RESULT, json.dumps(result, indent=2) + "\n")

    def _claim(self, recipe: dict[str, Any]) -> None:
        path = self.path / RECIPE
        if path.is_file():
            before = yaml.safe_load(path.read_text(encoding="utf-8"))
            differences = differing_fields(before, recipe)
            subject = (
                f"{self.path} holds a run of another recipe; set output_dir to another directory, or fresh=true to "
                "delete that run. Differing"
            )
            raise_all(ConfigError, subject, differences)
        else:
            self._write(RECIPE, yaml.safe_dump(recipe, sort_keys=False))

    def _write(self, name: str, text: str) -> None:
        temporary = self.path / f".{name}.tmp"
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(self.path / name)

    def _clear(self) -> None:
        """Remove the files of a run, and nothing else; the recipe last, since it identifies the others."""
        for name in reversed(OWNED):
            path = self.path / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
