"""The list of files of a run in docs/architecture.md."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import training_support as support
from rich.console import Console
from traced_files import listed_files, start_trace, stop_trace, traced_files

from core_rl_trainer import load_recipe
from core_rl_trainer.api import train_loaded
from core_rl_trainer.callbacks import Event, StepEnd

WAY = 40
"""Upper bound on the files of the table in order."""


@pytest.mark.nightly
def test_page_lists_files_of_a_run(start: Path, tmp_path: Path) -> None:
    """Files of the trainer between `train` and the end of the first step, after all modules are imported."""
    before_first_step: set[str] = set()

    def stop_after_first_step(event: Event) -> None:
        if isinstance(event, StepEnd) and event.step == 1:
            before_first_step.update(traced_files())

    def train_once(name: str) -> None:
        recipe = load_recipe(support.recipe_values(start, tmp_path / name, steps=2))
        train_loaded(recipe, [stop_after_first_step], Console(file=io.StringIO()))

    train_once("imports")
    before_first_step.clear()
    start_trace()
    try:
        train_once("run")
    finally:
        stop_trace()
    files = {file for file in before_first_step if "core_rl_trainer" in file and file.endswith(".py")}
    listed = listed_files("architecture.md", "## The life of a run")
    not_listed, not_run = files - set(listed), set(listed) - files
    assert not not_listed and not not_run, f"not listed: {sorted(not_listed)}; not run: {sorted(not_run)}"
    way = [
        file
        for file in listed
        if any(f"core_rl_trainer/{part}" in file for part in ("api", "recipe", "plan", "run"))
    ]
    assert len(way) <= WAY
