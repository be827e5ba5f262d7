"""The directory of a run: its files, its lock, and the recipe that it belongs to."""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import yaml

from core_rl.checkpoint.run import RunCheckpoints
from core_rl.config.secret import hidden
from core_rl.errors import ConfigError, raise_all
from core_rl_trainer.recipe.recipe import Recipe

__all__ = ["RunDirectory", "differing_fields", "open_run_directory"]

RECIPE, RESULT, PAGE, PICTURE, LOCK = "recipe.yaml", "result.json", "index.html", "curve.svg", ".lock"
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
    "adapter",
    "hub.json",
    "best",
    "best_model",
    PICTURE,
    PAGE,
    "reference",
)
CHANGEABLE = ("call_timeout_s", "push_to_hub")
"""Fields that may differ when a run is resumed."""


@contextmanager
def open_run_directory(recipe: Recipe) -> Iterator[RunDirectory]:
    """``recipe.output_dir``, for this process and this recipe alone.

    Raises `ConfigError` where nothing can be written, when another process is at work there, and one that names the
    differing fields when another recipe's run is there.
    """
    path = recipe.directory
    with _lock_file(path) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with the process, however it ends
        except BlockingIOError as error:
            raise ConfigError(
                f"another process is at work in {path}; wait for its end, or set output_dir"
            ) from error
        yield RunDirectory(recipe)


def _lock_file(path: Path) -> TextIO:
    """The open lock file in ``path``, which is made where it is missing."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        return (path / LOCK).open("w")
    except OSError as error:
        raise ConfigError(
            f"output_dir = {str(path)!r}: {error.strerror} ({error.filename}); name a directory that can be written"
        ) from error


class RunDirectory:
    """The files of ``recipe.output_dir``; made by `open_run_directory`."""

    def __init__(self, recipe: Recipe) -> None:
        self.path = recipe.directory
        self.weights = self.path / "weights"
        """The directory through which weights go to the rollout engine."""
        self.model = self.path / "model"
        """The trained model in Hugging Face format."""
        self.adapter = self.path / "adapter"
        """The trained adapter in the layout of ``peft``, of a run with ``model.lora``."""
        self.best = self.path / "best"
        """The directory with the model of the best evaluation."""
        self.best_model = self.path / "best_model"
        """A link to that model."""
        self.picture = self.path / PICTURE
        """The rewards, or the losses, over the steps."""
        self.page = self.path / PAGE
        """The page that shows the run."""
        if recipe.fresh:
            self._clear()
        self._claim(recipe.model_dump(mode="json", exclude={"fresh"}))
        self.checkpoints = RunCheckpoints(self.path / "checkpoints", recipe.keep)

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
            differences = differing_fields(_values(before), _values(recipe))
            subject = (
                f"{self.path} holds a run of another recipe; set output_dir to another directory, or fresh=true to "
                "delete that run. Differing"
            )
            raise_all(ConfigError, subject, differences)
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


def _values(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that decide on the values of a run."""
    return {name: value for name, value in recipe.items() if name not in CHANGEABLE}


def differing_fields(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """The dotted fields in which two recipes, as plain values, differ, with both values."""
    found: list[str] = []
    for name in sorted({*old, *new}):
        left, right = old.get(name), new.get(name)
        if isinstance(left, Mapping) and isinstance(right, Mapping):
            found += differing_fields(left, right, f"{prefix}{name}.")
        elif left != right:
            found.append(f"{prefix}{name}: {hidden(name, left)!r} then, {hidden(name, right)!r} now")
    return found
