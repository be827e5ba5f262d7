"""Columns of data: trained, named as not used, or refused."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import training_support as support
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core_rl.config.base import parse_config
from core_rl.errors import BatchError, ConfigError
from core_rl_trainer.data.columns import mapped, unused_columns
from core_rl_trainer.data.config import DataSource
from core_rl_trainer.data.kinds import DEMONSTRATIONS, PREFERENCES, ExampleKind
from core_rl_trainer.data.sources import open_source

CHAT = [{"from": "human", "value": "chat-1"}, {"from": "gpt", "value": "chat-2"}]
COLUMNS: dict[str, Any] = {
    **{
        name: f"text-{name}"
        for name in (
            *(
                "prompt",
                "answer",
                "completion",
                "instruction",
                "input",
                "context",
                "output",
                "response",
                "system",
            ),
            *(
                "question",
                "solution",
                "text",
                "chosen",
                "rejected",
                "id",
                "source",
                "margin",
                "functions",
                "videos",
            ),
        )
    },
    "chosen": "Q: chosen-1",
    "rejected": "Q: rejected-1",
    "conversations": CHAT,
    "history": [["history-1", "history-2"]],
    "tools": [{"name": "tool-1"}],
    "images": ["image-1"],
    "documents": [{"text": "document-1"}],
    "score_chosen": "score-1",
}
"""Columns of the formats, with texts of their own."""


def texts_of(value: object) -> list[str]:
    return re.findall(r"[a-z_]+-[a-z_0-9]+", json.dumps(value).replace("\\n", " "))


def texts_trained(path: Path, kind: ExampleKind, columns: dict[str, str]) -> set[str]:
    """Texts in the fields that are encoded, and the texts of the columns that are named as not used."""
    examples = mapped(open_source(parse_config(DataSource, {"path": str(path)})), columns, kind)
    example = examples[0]
    if (problem := kind.check(example)) is not None:
        raise BatchError(problem)
    unused = unused_columns(example, kind)
    return {text for name in example for text in texts_of(example[name]) if name not in unused} | {
        text for name in unused for text in texts_of(example[name])
    }


@pytest.mark.parametrize("kind", [DEMONSTRATIONS, PREFERENCES])
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(names=st.sets(st.sampled_from(sorted(COLUMNS)), min_size=2, max_size=7))
def test_no_column_is_lost(tmp_path: Path, kind: ExampleKind, names: set[str]) -> None:
    path = tmp_path / "a.jsonl"
    row = {name: COLUMNS[name] for name in sorted(names)}
    support.write_jsonl(path, [row])
    try:
        trained = texts_trained(path, kind, {})
    except (BatchError, ConfigError) as error:
        advice = dict(re.findall(r"data\.columns\.(\w+)=([a-z]+)\b", str(error)))
        if not advice:
            return  # refused by name
        try:
            trained = texts_trained(path, kind, advice)
        except (BatchError, ConfigError):
            return
    assert set(texts_of(row)) <= trained


def test_unused_columns_of_later_rows_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from core_rl_trainer.data.chat_template import ChatFormat
    from core_rl_trainer.data.datasets import ExampleDataset

    rows: list[dict[str, Any]] = [{"prompt": "1=", "answer": "1"}, {"prompt": "1=", "answer": "1", "id": 3}]
    support.write_jsonl(tmp_path / "a.jsonl", rows)
    source = open_source(DataSource(path=str(tmp_path / "a.jsonl")))
    with caplog.at_level(logging.WARNING):
        ExampleDataset(
            mapped(source, {}, DEMONSTRATIONS), DEMONSTRATIONS, ChatFormat(tokenizer=support.make_tokenizer())
        )
    assert "columns not used: 'id'" in caplog.text
