"""Metrics in Weights & Biases, offline: the values of ``metrics.jsonl``, and one run after resumes."""

from __future__ import annotations

import importlib
import json
import struct
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import training_support as support

from core_rl.config.base import parse_config
from core_rl.errors import ConfigError
from core_rl_trainer import load_recipe, train
from core_rl_trainer.logs.metrics_log import MetricsLog, WandbBoard, WandbSection, read_steps
from core_rl_trainer.recipe.recipe import Recipe

OFFLINE = WandbSection(mode="offline", project="tests", tags=("a", "b"))


HEADER, BLOCK = 7, 32768


def _chunks(data: bytes) -> Iterator[tuple[int, bytes]]:
    """A LevelDB log behind a header of its own: checksum, length and kind before each chunk of a record."""
    place = HEADER
    while place + 7 <= len(data):
        if BLOCK - place % BLOCK < 7:  # the rest of a block that has no room for another chunk
            place += BLOCK - place % BLOCK
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        yield kind, data[place + 7 : place + 7 + length]
        place += 7 + length


def _records(directory: Path) -> list[Any]:
    """The rows written for ``wandb sync``, run by run, in order."""
    messages = importlib.import_module("wandb.proto.wandb_internal_pb2")
    records = []
    for path in sorted(directory.glob("wandb/offline-run-*/*.wandb")):
        text = b""
        for kind, chunk in _chunks(path.read_bytes()):
            text += chunk
            if kind in (1, 4):  # whole, or the last part
                record = messages.Record()
                record.ParseFromString(text)
                records.append(record)
                text = b""
    return records


def _rows(records: list[Any]) -> list[dict[str, Any]]:
    rows = []
    for record in records:
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            row = {(item.key or ".".join(item.nested_key)): json.loads(item.value_json) for item in items}
            rows.append({name: value for name, value in row.items() if not name.startswith("_")})
    return rows


def test_wandb_rows_equal_metrics_file_after_resume(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    for done, steps in ((-1, (0, 1, 2)), (1, (2, 3))):
        board = WandbBoard(OFFLINE, tmp_path, {"seed": 3})
        with closing(MetricsLog(tmp_path, done, [board])) as log:
            for step in steps:
                log.write(step, {"reward": step / 7, "kl": float("nan") if step == 1 else 1e-9})
    records = _records(tmp_path)
    rows = _rows(records)
    assert [row["step"] for row in rows] == [0, 1, 2, 2, 3]
    logged = read_steps(tmp_path / "metrics.jsonl")
    expected = [{name: value for name, value in row.items() if value is not None} for row in logged]
    assert rows[:2] + rows[3:] == expected
    runs = {record.run.run_id for record in records if record.WhichOneof("record_type") == "run"}
    assert runs == {(tmp_path / ".wandb-run").read_text()}


def test_board_package_must_be_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    values = support.recipe_values(support.make_start(tmp_path), tmp_path / "out", wandb={})
    with pytest.raises(ConfigError, match="not installed: pip install wandb, or remove the section"):
        train(support.write_recipe(tmp_path / "r.yaml", values), [])
    assert not (tmp_path / "out").exists()


def test_wandb_section_from_command_line(tmp_path: Path) -> None:
    values = support.recipe_values(support.make_start(tmp_path), tmp_path / "out")
    recipe = load_recipe(support.write_recipe(tmp_path / "r.yaml", values), ["wandb.mode=offline"])
    assert recipe.wandb == WandbSection(mode="offline")
    assert parse_config(Recipe, recipe.model_dump()) == recipe
