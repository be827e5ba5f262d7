"""Named tensors in safetensors files: written from a stream, read slice by slice."""

from __future__ import annotations

import json
import pickle
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from checkpoint_support import TIMEOUT_S, on_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from core_rl.checkpoint.tensor_files import TensorFiles, write_tensors
from core_rl.distributed.comm import Comm
from core_rl.errors import CheckpointDamaged, CheckpointError, CheckpointNotFound, WeightsError

BASE = torch.arange(24.0).reshape(4, 6)
TENSORS = {
    "matrix": BASE,
    "transposed": BASE.t(),
    "a_row_of_it": BASE[1],
    "every_second": BASE[:, ::2],
    "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
    "scalar": torch.tensor(7.0),
    "empty": torch.zeros(0, 3),
    "half": torch.arange(5).to(torch.bfloat16),
    "counts": torch.arange(3),
}


def reusing(tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """A stream whose tensors are gone when the next one comes."""
    for name, tensor in tensors.items():
        lent = tensor.clone()
        yield name, lent
        lent.fill_(-1)


@pytest.mark.parametrize("limit", [1, 100, 2**30])
def test_tensors_come_back_bitwise(tmp_path: Path, limit: int) -> None:
    write_tensors(tmp_path, "master", reusing(TENSORS), writes=True, max_file_bytes=limit)
    files = TensorFiles(tmp_path, "master")
    assert set(files.names()) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert files.shape(name) == tuple(tensor.shape)
        found = files.read(name)
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor)


def test_tensors_with_shared_memory_are_separated(tmp_path: Path) -> None:
    write_tensors(tmp_path, "master", iter(TENSORS.items()), writes=True)
    files = TensorFiles(tmp_path, "master")
    assert all(torch.equal(files.read(name), tensor) for name, tensor in TENSORS.items())


@pytest.mark.parametrize(
    ("name", "slices"),
    [
        ("matrix", (slice(1, 3), slice(2, 5))),
        ("matrix", (slice(None), slice(5, 6))),
        ("matrix", (slice(2, 2), slice(None))),
        ("matrix", (slice(3, 9),)),
        ("scalar", ()),
        ("empty", (slice(0, 0), slice(1, 2))),
        ("counts", (slice(-2, None),)),
    ],
)
def test_slice_equals_indexing(tmp_path: Path, name: str, slices: tuple[slice, ...]) -> None:
    write_tensors(tmp_path, "model", iter(TENSORS.items()), writes=True)
    found = TensorFiles(tmp_path, "model").read(name, slices)
    assert torch.equal(found, TENSORS[name][slices])
    assert found.is_contiguous()


def test_files_are_named_as_transformers_names_them(tmp_path: Path) -> None:
    stream = {f"w{number}": torch.full((10,), float(number)) for number in range(5)}
    write_tensors(tmp_path, "model", iter(stream.items()), writes=True, max_file_bytes=80)
    names = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert sorted(file.name for file in tmp_path.iterdir()) == [*names, "model.safetensors.index.json"]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 5 * 40
    assert list(index["weight_map"].values()) == [names[0]] * 2 + [names[1]] * 2 + [names[2]]


def test_empty_stream_writes_empty_file(tmp_path: Path) -> None:
    write_tensors(tmp_path, "exp_avg", iter([]), writes=True)
    assert TensorFiles(tmp_path, "exp_avg").names() == []


def test_non_writer_follows_the_stream(tmp_path: Path) -> None:
    stream = iter([("a", None), ("b", None)])
    write_tensors(tmp_path, "model", stream, writes=False)
    assert next(stream, "the end") == "the end"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("items", "problem"),
    [
        ([("a", BASE), ("b", None), ("c", BASE)], "no data for 'b'"),
        ([("a", BASE), ("a", BASE), ("c", BASE)], "'a' twice"),
    ],
)
def test_a_bad_stream_is_refused_at_its_end(
    tmp_path: Path, items: list[tuple[str, Tensor | None]], problem: str
) -> None:
    stream = iter(items)
    with pytest.raises(CheckpointError, match=problem):
        write_tensors(tmp_path, "model", stream, writes=True)
    assert next(stream, "the end") == "the end"


def test_write_error_blocks_no_rank(tmp_path: Path) -> None:
    (tmp_path / "model-00001.safetensors").mkdir()  # in the way of the first file
    together = threading.Barrier(2)

    def collective(world: Comm) -> Iterator[tuple[str, Tensor | None]]:
        for number in range(6):
            together.wait(TIMEOUT_S)
            yield f"w{number}", torch.ones(10) if world.rank == 0 else None

    def save(world: Comm) -> None:
        write_tensors(tmp_path, "model", collective(world), writes=world.rank == 0, max_file_bytes=40)

    error, other = on_ranks(2, save)
    assert isinstance(error, CheckpointError)
    assert "model-00001.safetensors" in str(error)
    assert other is None


@pytest.mark.parametrize("limit", [40, 10**6])
def test_file_reader_can_be_pickled(tmp_path: Path, limit: int) -> None:
    write_tensors(tmp_path, "model", iter(TENSORS.items()), writes=True, max_file_bytes=limit)
    copy = pickle.loads(pickle.dumps(TensorFiles(tmp_path, "model")))
    assert torch.equal(copy.read("matrix"), BASE)


def _cut(directory: Path) -> str:
    file = directory / "model-00002-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    return file.name


def _remove(directory: Path) -> str:
    file = directory / "model-00002-of-00003.safetensors"
    file.unlink()
    return file.name


def _swap(directory: Path) -> str:
    first, second = (directory / f"model-0000{number}-of-00003.safetensors" for number in (1, 2))
    second.write_bytes(first.read_bytes())
    return second.name


def _garble(directory: Path) -> str:
    index = directory / "model.safetensors.index.json"
    index.write_text(index.read_text()[:-20])
    return index.name


@pytest.mark.parametrize("damage", [_cut, _remove, _swap, _garble])
def test_damage_is_refused_with_the_files_name(tmp_path: Path, damage: Callable[[Path], str]) -> None:
    stream = {f"w{number}": torch.full((10,), float(number)) for number in range(3)}
    write_tensors(tmp_path, "model", iter(stream.items()), writes=True, max_file_bytes=40)
    with pytest.raises(CheckpointDamaged, match=damage(tmp_path)):
        TensorFiles(tmp_path, "model")


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match=r"model\.safetensors"):
        TensorFiles(tmp_path, "model")
    write_tensors(tmp_path, "model", iter(TENSORS.items()), writes=True)
    with pytest.raises(WeightsError, match="no tensor 'lm_head'"):
        TensorFiles(tmp_path, "model").read("lm_head")


@given(
    st.lists(
        st.tuples(
            st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.bool]),
            st.lists(st.integers(0, 5), max_size=3),
        ),
        max_size=12,
    )
)
@settings(max_examples=30)
def test_dtypes_in_any_order_come_back(made: list[tuple[torch.dtype, list[int]]]) -> None:
    generator = torch.Generator().manual_seed(len(made))
    tensors = {
        f"t{number}": (torch.rand(shape, generator=generator) * 4).to(dtype)
        for number, (dtype, shape) in enumerate(made)
    }
    with tempfile.TemporaryDirectory() as name:
        write_tensors(Path(name), "model", iter(tensors.items()), writes=True)
        files = TensorFiles(Path(name), "model")
        assert set(files.names()) == set(tensors)
        for key, value in tensors.items():
            assert files.read(key).dtype == value.dtype
            assert torch.equal(files.read(key), value)


@pytest.mark.parametrize(
    "place", ["../model.safetensors", "{root}/model.safetensors", "a/../../model.safetensors"]
)
def test_index_names_only_inner_files(place: str, tmp_path: Path) -> None:
    write_tensors(tmp_path, "model", [("a", torch.ones(2))], writes=True)
    inside = tmp_path / "a"
    inside.mkdir()
    index = {"weight_map": {"a": place.format(root=tmp_path)}}
    (inside / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointDamaged, match=r"index\.json names .*, which lies outside of its directory"):
        TensorFiles(inside, "model")


def test_single_file_next_to_shards_raises(tmp_path: Path) -> None:
    tensors = [("a", torch.ones(2)), ("b", torch.zeros(2))]
    write_tensors(tmp_path, "model", tensors, writes=True, max_file_bytes=8)
    write_tensors(tmp_path, "model", tensors, writes=True)
    with pytest.raises(
        CheckpointDamaged, match=r"model\.safetensors lies next to the files of model\.safetensors\.index"
    ):
        TensorFiles(tmp_path, "model")


def test_links_of_the_hub_cache_are_read(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "1"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    write_tensors(
        blobs, "model", [("a", torch.ones(2)), ("b", torch.zeros(2))], writes=True, max_file_bytes=8
    )
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
    assert TensorFiles(snapshot, "model").read("b").tolist() == [0, 0]


def mapped_bytes() -> int:
    """Pages of files in this process's memory."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssFile:")[1].split()[0]) * 1024


@pytest.mark.parametrize("columns", [False, True])
def test_read_pages_do_not_stay(columns: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that reads its part of each tensor would keep the whole file in its memory."""
    tensors = {f"layer.{n}": torch.full((1024, 1024), float(n)) for n in range(16)}
    write_tensors(tmp_path, "model", iter(tensors.items()), writes=True)
    files = TensorFiles(tmp_path, "model")
    monkeypatch.setattr("core_rl.checkpoint.tensor_files.MAPPED_BYTES", 4 * 2**20)
    before, highest = mapped_bytes(), 0
    for name, tensor in tensors.items():
        part = (slice(0, 1024), slice(512, 1024)) if columns else (slice(0, 1024), slice(0, 1024))
        assert torch.equal(files.read(name, part), tensor[part])
        highest = max(highest, mapped_bytes() - before)
    assert highest < 20 * 2**20 < 16 * tensors["layer.0"].nbytes


def test_replaced_file_is_not_mixed_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("core_rl.checkpoint.tensor_files.MAPPED_BYTES", 0)
    write_tensors(tmp_path, "model", iter({"a": torch.ones(4), "b": torch.ones(4)}.items()), writes=True)
    files = TensorFiles(tmp_path, "model")
    files.read("a")
    (tmp_path / "model.safetensors").rename(tmp_path / "older.safetensors")
    write_tensors(tmp_path, "model", iter({"a": torch.zeros(4), "b": torch.zeros(4)}.items()), writes=True)
    assert torch.equal(files.read("b"), torch.ones(4))
