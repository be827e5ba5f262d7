"""Frozen rollouts are read from files line by line, and keep lengths, masks and groups."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from core_rl.errors import ConfigError
from core_rl_conformance.differences.run import read_rows, rollouts_of

LINES: list[dict[str, object]] = [
    {"prompt_ids": [1, 2] * 40, "completion_ids": [3] * 80, "reward": 1.0, "advantage": 0.5},
    {"prompt_ids": [1, 2] * 40, "completion_ids": [4] * 40, "completion_mask": [True] * 20 + [False] * 20},
    {"prompt_ids": [9], "completion_ids": [5], "group": "b"},
]


def _written(path: Path, lines: Sequence[object]) -> Path:
    path.write_text("\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    return path


def test_files_keep_lengths_masks_and_groups(tmp_path: Path) -> None:
    rows = read_rows(_written(tmp_path / "frozen.jsonl", LINES))
    first, second, third = rollouts_of(rows, 211, 0).rows
    assert [len(row.ids) for row in (first, second, third)] == [40, 30, 2]
    assert [sum(row.mask) for row in (first, second, third)] == [20, 5, 1]
    assert [first.group, second.group, third.group] == [0, 0, 1]
    assert (first.reward, first.advantages[0]) == (1.0, 0.5)
    assert len({row.ids[0] for row in (first, second, third)}) == 3


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"prompt_ids": [1]}, "line 1: field 'completion_ids': Field required"),
        ({**LINES[2], "text": "a"}, "line 1: field 'text': .*fields are prompt_ids, completion_ids"),
        ({**LINES[2], "completion_mask": [True, True]}, "completion_mask has 2 values and completion_ids 1"),
        ({**LINES[2], "reward": float("nan")}, "line 1: field 'reward'"),
    ],
)
def test_wrong_lines_are_refused(line: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        read_rows(_written(tmp_path / "frozen.jsonl", [line]))


def test_empty_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no line"):
        read_rows(_written(tmp_path / "frozen.jsonl", []))
