"""Data sets of other systems: directories that ``datasets`` wrote, and TRL's and verl's formats as TRL reads them.

``nox -s trl`` has the packages.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest
from trl.data_utils import extract_prompt, maybe_convert_to_chatml

from core_rl.errors import BatchError, ConfigError
from core_rl_trainer.data.columns import mapped
from core_rl_trainer.data.config import DataSource
from core_rl_trainer.data.kinds import DEMONSTRATIONS, PREFERENCES, PROMPTS, ExampleKind
from core_rl_trainer.data.sources import open_source


def table(rows: list[dict[str, Any]]) -> datasets.Dataset:
    """A dataset; with a fingerprint, it need not be pickled for one."""
    return datasets.Dataset(datasets.table.InMemoryTable(pa.Table.from_pylist(rows)), fingerprint="rows")


def read(path: Path, kind: ExampleKind = PROMPTS) -> list[dict[str, Any]]:
    examples = mapped(open_source(DataSource(path=str(path))), {}, kind)
    return [examples[number] for number in range(len(examples))]


def saved(path: Path, rows: list[dict[str, Any]], kind: ExampleKind) -> list[dict[str, Any]]:
    """``rows`` after `datasets` wrote them."""
    table(rows).save_to_disk(path / "saved")
    return read(path / "saved", kind)


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def test_examples_of_a_saved_dataset(tmp_path: Path) -> None:
    rows = [{"prompt": "1+1=", "answer": 2}, {"prompt": "1+2=", "answer": 3}]
    assert saved(tmp_path, rows, PROMPTS) == rows


def test_chat_messages_of_a_saved_dataset(tmp_path: Path) -> None:
    rows = [{"prompt": [turn("user", "1+1=")]}]
    assert saved(tmp_path, rows, PROMPTS) == rows


def test_an_example_without_a_prompt_is_named(tmp_path: Path) -> None:
    with pytest.raises(BatchError, match=r"row 1 needs a text 'prompt'.*data.columns.prompt=question"):
        saved(tmp_path, [{"question": "1+1="}], PROMPTS)


def test_splits_and_foreign_directories_are_refused(tmp_path: Path) -> None:
    splits = {name: table([{"prompt": "1+1="}]) for name in ("dev", "test")}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "splits")
    with pytest.raises(ConfigError, match="there are several splits; it has 'dev', 'test'"):
        read(tmp_path / "splits")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="holds no dataset"):
        read(tmp_path / "empty")


PAIRS: list[dict[str, Any]] = [
    {
        "chosen": [turn("user", "What colour?"), turn("assistant", "Blue.")],
        "rejected": [turn("user", "What colour?"), turn("assistant", "Green.")],
    },
    {
        "chosen": [turn("user", "a"), turn("assistant", "b"), turn("user", "c"), turn("assistant", "d")],
        "rejected": [turn("user", "a"), turn("assistant", "b"), turn("user", "c"), turn("assistant", "e")],
    },
]


@pytest.mark.parametrize(
    "row", [*PAIRS, {"chosen": "The sky is blue.", "rejected": "The sky is green."}], ids=str
)
def test_implicit_prompts_match_trl(tmp_path: Path, row: dict[str, Any]) -> None:
    assert saved(tmp_path, [row], PREFERENCES) == [extract_prompt(row)]


def test_sharegpt_is_read_as_trl_does(tmp_path: Path) -> None:
    row = {"conversations": [{"from": "user", "value": "1+1="}, {"from": "assistant", "value": "2"}]}
    [example] = saved(tmp_path, [row], DEMONSTRATIONS)
    assert example["messages"] == maybe_convert_to_chatml(row)["messages"]


def test_reads_gsm8k_prepared_by_verl(tmp_path: Path) -> None:
    # The fields that examples/data_preprocess/gsm8k.py of verl writes.
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [turn("user", "1+1=")],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"split": "train", "index": 0, "answer": "1+1 is 2. #### 2", "question": "1+1="},
    }
    assert saved(tmp_path, [row], PROMPTS) == [row | {"answer": "2"}]
