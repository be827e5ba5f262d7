"""Examples from a directory that ``datasets`` wrote; ``nox -s trl`` has the package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest

from core_rl.errors import BatchError, ConfigError
from core_rl_trainer.data.examples import check_prompt, read_examples


def table(rows: list[dict[str, Any]]) -> datasets.Dataset:
    """A dataset; with a fingerprint, it need not be pickled for one."""
    return datasets.Dataset(datasets.table.InMemoryTable(pa.Table.from_pylist(rows)), fingerprint="rows")


def test_examples_of_a_saved_dataset(tmp_path: Path) -> None:
    rows = [{"prompt": "1+1=", "answer": 2}, {"prompt": "1+2=", "answer": 3}]
    table(rows).save_to_disk(tmp_path / "saved")
    assert read_examples(tmp_path / "saved", check_prompt) == rows


def test_chat_messages_of_a_saved_dataset(tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": "1+1="}]}]
    table(rows).save_to_disk(tmp_path / "saved")
    assert read_examples(tmp_path / "saved", check_prompt) == rows


def test_a_damaged_example_is_named(tmp_path: Path) -> None:
    table([{"prompt": "1+1="}, {"prompt": ""}]).save_to_disk(tmp_path / "saved")
    with pytest.raises(BatchError, match="example 1 needs a text 'prompt'"):
        read_examples(tmp_path / "saved", check_prompt)


def test_splits_and_other_directories_are_refused(tmp_path: Path) -> None:
    datasets.DatasetDict({"train": table([{"prompt": "1+1="}])}).save_to_disk(tmp_path / "splits")
    with pytest.raises(ConfigError, match="name one of them, such as .*/train"):
        read_examples(tmp_path / "splits", check_prompt)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="holds no dataset"):
        read_examples(tmp_path / "empty", check_prompt)
