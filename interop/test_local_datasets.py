"""Rows from a directory that ``datasets`` wrote; ``nox -s trl`` has the package."""

from __future__ import annotations

from pathlib import Path

import datasets
import pytest

from core_rl.errors import BatchError, ConfigError
from core_rl.training.rows import check_prompt, read_rows


def test_rows_of_a_saved_dataset(tmp_path: Path) -> None:
    rows = [{"prompt": "1+1=", "answer": 2}, {"prompt": "1+2=", "answer": 3}]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    assert read_rows(tmp_path / "saved", check_prompt) == rows


def test_a_damaged_row_is_named(tmp_path: Path) -> None:
    datasets.Dataset.from_list([{"prompt": "1+1="}, {"prompt": ""}]).save_to_disk(tmp_path / "saved")
    with pytest.raises(BatchError, match="row 1 needs a text 'prompt'"):
        read_rows(tmp_path / "saved", check_prompt)


def test_splits_and_other_directories_are_refused(tmp_path: Path) -> None:
    table = datasets.Dataset.from_list([{"prompt": "1+1="}])
    datasets.DatasetDict({"train": table}).save_to_disk(tmp_path / "splits")
    with pytest.raises(ConfigError, match="name one of them, such as .*/train"):
        read_rows(tmp_path / "splits", check_prompt)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="holds no dataset"):
        read_rows(tmp_path / "empty", check_prompt)
