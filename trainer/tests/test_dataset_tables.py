"""Tables that the package ``datasets`` reads: parquet, CSV, saved datasets, and the Hub's caches without a network."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from core_rl.errors import ConfigError
from core_rl_trainer.data.examples import Examples
from core_rl_trainer.data.sources import open_source
from core_rl_trainer.recipe.data import DataSource

datasets = pytest.importorskip("datasets", reason="the extra 'data' is not installed")
import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402

ROWS = [{"question": f"{n}+1=", "solution": str(n + 1)} for n in range(3)]
REVISION = "a" * 40
CARD = """---
configs:
- config_name: main
  data_files: [{split: train, path: main/train.parquet}, {split: test, path: main/test.parquet}]
- config_name: other
  data_files: [{split: train, path: main/train.parquet}]
---
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty caches, and no network. The variables are read when the packages are imported."""
    hub = tmp_path / "cache" / "hub"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache" / "datasets")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return hub


def read(path: object, default_split: str | None = None, **fields: Any) -> Examples:
    return open_source(DataSource(path=str(path), **fields), default_split)


def rows(examples: Examples) -> list[dict[str, Any]]:
    return [examples[n] for n in range(len(examples))]


def write_parquet(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(ROWS), path)
    return path


def downloaded(hub: Path) -> None:
    """A dataset as ``hf download`` leaves it."""
    home = hub / "datasets--acme--sums"
    for split in ("train", "test"):
        write_parquet(home / "snapshots" / REVISION / "main" / f"{split}.parquet")
    (home / "snapshots" / REVISION / "README.md").write_text(CARD)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(REVISION)


def test_parquet_and_csv(tmp_path: Path) -> None:
    assert rows(read(write_parquet(tmp_path / "a.parquet"))) == ROWS
    with (tmp_path / "a.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ROWS[0])
        writer.writeheader()
        writer.writerows(ROWS)
    assert rows(read(tmp_path / "a.csv")) == [{**row, "solution": int(row["solution"])} for row in ROWS]


def test_messages_have_no_keys_of_others(tmp_path: Path) -> None:
    chats = [[{"role": "user", "content": "1="}], [{"role": "tool", "content": "2", "name": "sum"}]]
    pq.write_table(pa.Table.from_pylist([{"messages": chat} for chat in chats]), tmp_path / "a.parquet")
    assert [row["messages"] for row in rows(read(tmp_path / "a.parquet"))] == chats


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.parquet", b"", "a.parquet is empty"),
        ("a.parquet", b"hello", "a.parquet cannot be read as parquet: Parquet file size"),
        ("a.csv", b"question,solution\n", "a.csv has no rows"),
        ("a.csv", b'a,b\n"1\n', "a.csv cannot be read as csv"),
    ],
)
def test_a_damaged_table_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read(tmp_path / name)


def test_a_downloaded_dataset_of_the_hub(own_cache: Path) -> None:
    downloaded(own_cache)
    assert rows(read("acme/sums", "train", config="main")) == ROWS
    assert rows(read(f"acme/sums@{REVISION}", config="main", split="test")) == ROWS


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        ("acme/sums", {}, r"Config name is missing.*\['main', 'other'\]; set 'config'"),
        ("acme/sums", {"config": "mian"}, r"'mian' not found. Available: \['main', 'other'\]"),
        ("acme/sums", {"config": "main"}, "there are several splits; it has 'train', 'test'. Set 'split'"),
        ("acme/sums", {"config": "main", "split": "dev"}, "no split 'dev'; it has 'train', 'test'"),
        (
            "acme/sums@v2",
            {"config": "main"},
            r"no complete copy .* in revision 'v2', while HF_HUB_OFFLINE forbids",
        ),
        (
            "acme/none",
            {},
            r"no such file, and the local cache has no complete copy .*hf download --repo-type dataset",
        ),
    ],
)
def test_what_the_cache_lacks_is_named(
    own_cache: Path, path: str, fields: dict[str, str], message: str
) -> None:
    downloaded(own_cache)
    with pytest.raises(ConfigError, match=message):
        read(path, **fields)


def test_the_cache_of_datasets_counts(own_cache: Path, tmp_path: Path) -> None:
    cache = own_cache.parent / "datasets"
    local = write_parquet(tmp_path / "sums" / "train.parquet").parent
    datasets.load_dataset(str(local))
    made = next(cache.glob("sums/*/0.0.0/*/dataset_info.json")).parent
    kept = cache / "acme___sums" / "default" / "0.0.0" / REVISION
    kept.parent.mkdir(parents=True)
    made.rename(kept)
    info = json.loads((kept / "dataset_info.json").read_text())
    (kept / "dataset_info.json").write_text(json.dumps(info | {"config_name": "default"}))
    assert rows(read("acme/sums")) == ROWS


def test_the_package_is_named_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    path = write_parquet(tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=r"a.parquet is a .parquet file, .*pip install 'core-rl\[data\]'"):
        read(path)
