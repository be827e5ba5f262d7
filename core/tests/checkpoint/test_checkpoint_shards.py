"""Shards: any cut of any tensor over any number of ranks, read at any slice."""

from __future__ import annotations

import itertools
import pickle
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_support import in_child
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor

from core_rl.checkpoint import tensor_files
from core_rl.checkpoint.shards import ShardFiles, write_copies
from core_rl.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointNotFound,
    EngineContractError,
    WeightsError,
)
from core_rl.state.slices import Shard, copy_shards


def cut(tensor: Tensor, bounds: list[list[int]], name: str = "w") -> Iterator[Shard]:
    """The pieces between ``bounds`` (one sorted list, with both ends, for each dimension)."""
    for region in itertools.product(*(itertools.pairwise(dimension) for dimension in bounds)):
        part = tensor[tuple(slice(start, stop) for start, stop in region)]
        yield Shard(name, part, tuple(tensor.shape), tuple(start for start, _ in region))


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[list[int]], tuple[slice, ...] | None]:
    """A shape, where it is cut, and a slice to read."""
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
    bounds = [[0, *sorted(draw(st.lists(st.integers(0, size), max_size=3))), size] for size in shape]
    ends = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in shape]
    return shape, bounds, draw(st.one_of(st.none(), st.just(tuple(slice(*end) for end in ends))))


@settings(max_examples=150)
@given(
    cuts(),
    st.integers(1, 4),
    st.randoms(use_true_random=False),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_any_slice_of_any_cut_is_read(
    case: tuple[tuple[int, ...], list[list[int]], tuple[slice, ...] | None],
    world_size: int,
    random: Any,
    dtype: torch.dtype,
) -> None:
    shape, bounds, slices = case
    whole = torch.randn(shape).to(dtype)
    pieces = list(cut(whole, bounds))
    held: list[list[Shard]] = [[] for _ in range(world_size)]
    for piece in pieces:
        for rank in random.sample(range(world_size), random.randint(1, world_size)):  # with replicas
            held[rank].append(piece)
    with tempfile.TemporaryDirectory() as name:
        for rank, mine in enumerate(held):
            write_copies(Path(name), rank, copy_shards(rank, iter(mine)), world_size)
        files = ShardFiles(Path(name))
        assert files.names() == ["w"]
        assert files.shape("w") == shape
        found = files.read("w", slices)
        assert torch.equal(found, whole if slices is None else whole[slices])
        assert found.dtype == dtype
        assert found.is_contiguous()


@settings(max_examples=100)
@given(cuts(), st.randoms(use_true_random=False))
def test_uncovered_region_is_refused(
    case: tuple[tuple[int, ...], list[list[int]], tuple[slice, ...] | None], random: Any
) -> None:
    shape, bounds, slices = case
    marks = torch.zeros(shape)
    pieces = list(cut(marks, bounds))
    lost = random.choice(pieces)
    lost.tensor.fill_(1)
    wanted = marks if slices is None else marks[slices]
    with tempfile.TemporaryDirectory() as name:
        write_copies(Path(name), 0, copy_shards(0, [piece for piece in pieces if piece is not lost]), 1)
        if len(pieces) == 1:
            assert ShardFiles(Path(name)).names() == []
        elif wanted.any():
            with pytest.raises(CheckpointDamaged, match="of the tensor 'w'"):
                ShardFiles(Path(name)).read("w", slices)
        else:
            assert torch.equal(ShardFiles(Path(name)).read("w", slices), wanted)


def test_pieces_may_overlap_and_share_memory(tmp_path: Path) -> None:
    whole = torch.arange(10.0)
    pieces = [Shard("w", whole[start:stop], (10,), (start,)) for start, stop in ((0, 6), (4, 10), (2, 3))]
    write_copies(tmp_path, 0, copy_shards(0, [*pieces, Shard("v", whole, (10,), (0,))]), 1)
    assert torch.equal(ShardFiles(tmp_path).read("w", (slice(1, 9),)), whole[1:9])


@pytest.mark.parametrize(
    ("tensor", "shape", "offsets"),
    [
        (torch.zeros(3), (4,), (2,)),
        (torch.zeros(3), (4,), (-1,)),
        (torch.zeros(3), (3, 1), (0,)),
        (torch.zeros(()), (1,), (0,)),
    ],
)
def test_a_piece_outside_of_its_tensor_is_refused(
    tmp_path: Path, tensor: Tensor, shape: tuple[int, ...], offsets: tuple[int, ...]
) -> None:
    with pytest.raises(EngineContractError, match="rank 3: 'w'"):
        write_copies(tmp_path, 3, copy_shards(3, [Shard("w", tensor, shape, offsets)]), 4)


def two_ranks(directory: Path, second_shape: tuple[int, ...] = (4,)) -> None:
    for rank in (0, 1):
        shape = (4,) if rank == 0 else second_shape
        write_copies(directory, rank, copy_shards(rank, [Shard("w", torch.zeros(2), shape, (2 * rank,))]), 2)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_missing_or_truncated_file_is_named(tmp_path: Path, rank: int) -> None:
    two_ranks(tmp_path)
    file = tmp_path / f"rank-0000{rank}.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointDamaged, match=file.name):
        ShardFiles(tmp_path)
    file.unlink()
    with pytest.raises(CheckpointDamaged, match=f"{file.name}: missing"):
        ShardFiles(tmp_path)


def test_rank_opens_only_files_it_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the files of all ranks, whose headers another rank has read."""
    whole = torch.arange(12.0).reshape(4, 3)
    for rank, shard in enumerate(cut(whole, [[0, 1, 2, 3, 4], [0, 3]])):
        write_copies(tmp_path, rank, copy_shards(rank, [shard]), 4)
    sent, opened = pickle.dumps(ShardFiles(tmp_path)), list[str]()

    def noted(path: Path, framework: str) -> Any:
        opened.append(path.name)
        return safe_open(path, framework=framework)

    monkeypatch.setattr(tensor_files, "safe_open", noted)
    files = pickle.loads(sent)
    assert files.shape("w") == (4, 3)
    assert torch.equal(files.read("w", (slice(1, 3), slice(0, 3))), whole[1:3])
    assert opened == ["rank-00001.safetensors", "rank-00002.safetensors"]


def test_contradicting_pieces_are_refused(tmp_path: Path) -> None:
    two_ranks(tmp_path, second_shape=(5,))
    with pytest.raises(CheckpointDamaged, match=r"rank-00001.*'w' is \(5,\), and \(4,\) elsewhere"):
        ShardFiles(tmp_path)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match="rank-00000"):
        ShardFiles(tmp_path)
    two_ranks(tmp_path)
    with pytest.raises(WeightsError, match="no tensor 'v'"):
        ShardFiles(tmp_path).read("v")
    with pytest.raises(WeightsError, match="step 2"):
        ShardFiles(tmp_path).read("w", (slice(0, 4, 2),))


def test_shard_on_full_disk_raises_clear_error(tmp_path: Path) -> None:
    import resource

    def save() -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors: .*too large"):
            write_copies(tmp_path, 0, copy_shards(0, [Shard("w", torch.zeros(1000), (1000,), (0,))]), 1)

    assert in_child(save) == 0
