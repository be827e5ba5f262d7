"""Tables that the package ``datasets`` reads: parquet, CSV, saved datasets, and the Hub's caches without a network."""

from __future__ import annotations

import gzip
import json
from datetime import UTC, datetime
from decimal import Decimal
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from core_rl.errors import BatchError, ConfigError
from core_rl_trainer.data.config import DataSource
from core_rl_trainer.data.examples import Examples, answer_text, check_demonstration
from core_rl_trainer.data.sources import open_source

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


def test_parquet_files_are_read(tmp_path: Path) -> None:
    assert rows(read(write_parquet(tmp_path / "a.parquet"))) == ROWS


@pytest.mark.parametrize(
    ("values", "kind", "texts"),
    [
        ([2, None], pa.int64(), ["2", None]),
        ([0.5, 2.0], pa.float64(), ["0.5", "2.0"]),
        ([0.1, 3.14], pa.float32(), ["0.1", "3.14"]),
        ([Decimal("0.50"), Decimal("-7.00")], pa.decimal128(20, 2), ["0.50", "-7.00"]),
        ([True, False], pa.bool_(), ["true", "false"]),
        (["068", "NA"], pa.string(), ["068", "NA"]),
        ([float("nan"), float("inf")], pa.float64(), [None, None]),
        ([datetime(2024, 1, 2, tzinfo=UTC)], pa.timestamp("ms"), [None]),
        ([b"068"], pa.binary(), [None]),
    ],
)
def test_typed_cells_become_text_or_errors(
    tmp_path: Path, values: list[Any], kind: pa.DataType, texts: list[str | None]
) -> None:
    """None: the cell is refused as an answer."""
    table = pa.table({"prompt": ["1="] * len(values), "answer": pa.array(values, kind)})
    pq.write_table(table, tmp_path / "a.parquet")
    examples = rows(read(tmp_path / "a.parquet"))
    checked = [None if check_demonstration(row) else answer_text(row["answer"]) for row in examples]
    assert checked == texts


@pytest.mark.parametrize(("nested", "numbers"), [(False, [1, 0, None, -1]), (True, [[1, 0], [], [None]])])
@pytest.mark.parametrize("saved", [False, True])
def test_classes_have_their_names(tmp_path: Path, nested: bool, numbers: list[Any], saved: bool) -> None:
    label = datasets.ClassLabel(names=["bad", "good"])
    features = datasets.Features({"answer": datasets.List(label) if nested else label})
    table = datasets.Dataset.from_dict({"answer": numbers}, features=features)
    path = tmp_path / ("directory" if saved else "a.parquet")
    (table.save_to_disk if saved else table.to_parquet)(str(path))
    names = [["good", "bad"], [], [None]] if nested else ["good", "bad", None, None]
    assert [row["answer"] for row in rows(read(path))] == names


def test_csv_in_directories_stays_text(tmp_path: Path) -> None:
    (tmp_path / "sums").mkdir()
    (tmp_path / "sums" / "train.csv").write_text("prompt,answer\n1=,068\n2=,NA\n3=,\n4=,0.50\n5=,true\n")
    assert [row["answer"] for row in rows(read(tmp_path / "sums"))] == ["068", "NA", "", "0.50", "true"]


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_json_in_directories_keeps_digits(tmp_path: Path, suffix: str) -> None:
    directory = tmp_path / "rows"
    directory.mkdir()
    for name, answer in (("train-0", "0.50"), ("train-1", "68.0"), ("test", "1")):
        content = f'{{"prompt": "q", "answer": {answer}}}\n'.encode()
        path = directory / f"{name}.jsonl{suffix}"
        path.write_bytes(gzip.compress(content) if suffix else content)
    examples = open_source(DataSource(path=str(directory), split="train"))
    assert [answer_text(examples[n]["answer"]) for n in range(len(examples))] == ["0.50", "68.0"]
    damaged = b'{"prompt": '
    (directory / f"train-1.jsonl{suffix}").write_bytes(gzip.compress(damaged) if suffix else damaged)
    examples = open_source(DataSource(path=str(directory), split="train"))
    with pytest.raises(BatchError, match=rf"train-1\.jsonl{suffix}: line 1 is not JSON"):
        examples[1]


@pytest.mark.parametrize(
    ("names", "left"),
    [
        (("a.jsonl", "b.csv"), "b.csv"),
        (("a.jsonl", "c.jsonl", "sub/b.parquet"), "sub/b.parquet"),
        (("train.jsonl", "extra.jsonl"), "extra.jsonl"),
        (("a.jsonl", "b.json", ".c.csv", "dataset_info.json", "LICENSE.txt"), None),
    ],
)
def test_files_left_out_are_refused(tmp_path: Path, names: tuple[str, ...], left: str | None) -> None:
    for name in names:
        (tmp_path / "d" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "d" / name).write_text('{"prompt": "q", "answer": "1"}\n')
    if left is None:
        assert len(open_source(DataSource(path=str(tmp_path / "d")))) == 2
    else:
        with pytest.raises(ConfigError, match=f"'{left}' would not be read"):
            open_source(DataSource(path=str(tmp_path / "d")))


def test_messages_lack_keys_of_further_rows(tmp_path: Path) -> None:
    calls = [{"function": {"name": name, "arguments": {name: 1}}} for name in ("sum", "product")]
    chats = [
        [{"role": "user", "content": "1="}, {"role": "assistant", "content": None, "tool_calls": calls}],
        [{"role": "tool", "content": "2", "name": "sum"}],
    ]
    pq.write_table(pa.Table.from_pylist([{"messages": chat} for chat in chats]), tmp_path / "a.parquet")
    assert [row["messages"] for row in rows(read(tmp_path / "a.parquet"))] == chats


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.parquet", b"", "a.parquet is empty"),
        ("a.parquet", b"hello", "a.parquet cannot be read as parquet: Parquet file size"),
        ("a.parquet.gz", b"hello", "compressed parquet files are not read; decompress it"),
    ],
)
def test_a_damaged_table_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read(tmp_path / name)


def test_columns_of_unread_types_are_named(tmp_path: Path) -> None:
    column = pa.array([[("k", "v")]], pa.map_(pa.string(), pa.string()))
    (tmp_path / "d").mkdir()
    pq.write_table(pa.table({"meta": column}), tmp_path / "d/a.parquet")
    for path in (tmp_path / "d", tmp_path / "d/a.parquet"):
        with pytest.raises(ConfigError, match=r"map<.*'meta'.*; write that column as JSON text"):
            read(path)


def test_brackets_in_paths_are_read_or_named(tmp_path: Path) -> None:
    (tmp_path / "[v2]").mkdir()
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "[v2]/a.parquet")
    assert rows(read(tmp_path / "[v2]/a.parquet")) == ROWS
    with pytest.raises(ConfigError, match="rename it: .*brackets"):
        read(tmp_path / "[v2]")


def test_a_downloaded_dataset_of_the_hub(own_cache: Path) -> None:
    downloaded(own_cache)
    assert rows(read("acme/sums", "train", config="main")) == ROWS
    assert rows(read(f"acme/sums@{REVISION}", config="main", split="test")) == ROWS


def test_digest_follows_rows_of_the_hub(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def digest(path: str, rows: list[dict[str, str]] = ROWS) -> str:
        pq.write_table(pa.Table.from_pylist(rows), file, row_group_size=len(rows) - 1)
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", own_cache / str(next(numbers)))
        return str(read(path, config="main", split="train").digest)

    numbers = count()
    downloaded(own_cache)
    file = own_cache / "datasets--acme--sums" / "snapshots" / REVISION / "main" / "train.parquet"
    before = digest("acme/sums")
    assert digest(f"acme/sums@{REVISION}") == before
    assert digest("acme/sums", [*ROWS[:2], {"question": "2+1=", "solution": "3.0"}]) != before
    assert digest("acme/sums", ROWS[::-1]) != before


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            pa.array([b"\xff"]).cast(pa.string(), safe=False),
            "a value in 'made' that cannot be read: 'utf-8' codec",
        ),
        (pa.array([10**15], pa.timestamp("ms")), "a value in 'made' that cannot be read: "),
    ],
)
def test_values_out_of_range_are_named(tmp_path: Path, value: Any, message: str) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"prompt": ["a"], "made": value}), path)
    with pytest.raises(BatchError, match=f"row 1 has {message}"):
        rows(read(path))


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
def test_datasets_missing_in_cache_are_named(
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
    cached = cache / "acme___sums" / "default" / "0.0.0" / REVISION
    cached.parent.mkdir(parents=True)
    made.rename(cached)
    info = json.loads((cached / "dataset_info.json").read_text())
    (cached / "dataset_info.json").write_text(json.dumps(info | {"config_name": "default"}))
    assert rows(read("acme/sums")) == ROWS
