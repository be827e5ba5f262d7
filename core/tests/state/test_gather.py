"""Placements of slices over ranks: a tensor is gathered whole where they tile it once, and refused otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from queue import Queue
from typing import Any

import pytest
import torch
from checkpoint_support import on_ranks

from core_rl.backend.protocols import SupportsOwnExport
from core_rl.backend.tensors import LocalSlice, NamedTensors, TensorSource
from core_rl.distributed.comm import Comm
from core_rl.errors import EngineContractError
from core_rl.state.gather import Gather
from core_rl.state.slices import Placements, gather_placements, writers
from core_rl.state.store import TensorStore

WHOLE = torch.arange(10.0).view(5, 2)


@dataclass
class Held:
    """The sharded state of one rank: slices of one kind."""

    slices: list[LocalSlice]
    full: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: {"w": (5, 2)})
    optimizer_kinds: tuple[str, ...] = ()
    carried: None = None

    def shapes(self, kind: str) -> Mapping[str, tuple[int, ...]]:
        return self.full

    def local(self, kind: str) -> Iterator[LocalSlice]:
        return iter(self.slices)


def part(rows: int, start: int, replica: int = 0, name: str = "w") -> LocalSlice:
    return LocalSlice(name, (start, 0), torch.zeros(rows, 2), replica)


def placed(*ranks: Held) -> list[object]:
    """The placements that each rank finds, or the error that it raises."""
    return on_ranks(len(ranks), lambda world: gather_placements(ranks[world.rank], "master", world))


TILED = {
    "halves": (part(3, 0), part(2, 3)),
    "replicas": (part(5, 0), part(5, 0, replica=1)),
    "all on one": (part(5, 0), part(0, 5)),
}


@pytest.mark.parametrize("case", TILED)
def test_tiled_slices_are_accepted(case: str) -> None:
    own, other = TILED[case]
    first, second = placed(Held([own]), Held([other]))
    assert first == second and not isinstance(first, Exception)


SIZES = {"a": 10, "b": 6, "c": 5, "d": 4, "e": 3, "alone": 7}
"""Numbers of rows; ``alone`` is on rank 1, and all others are on three ranks."""


def copies(rank: int) -> Held:
    slices = [part(rows, 0, rank, name) for name, rows in SIZES.items() if name != "alone"]
    if rank == 1:
        slices.append(part(SIZES["alone"], 0, name="alone"))
    return Held(slices, {name: (rows, 2) for name, rows in SIZES.items()})


def test_replicas_write_equal_shares() -> None:
    first, *others = placed(*(copies(rank) for rank in range(3)))
    assert isinstance(first, Placements)
    assert others == [first, first]
    written = [0, 0, 0]
    chosen = writers(first, written)
    assert {name for name, *_ in chosen} == SIZES.keys()
    assert chosen["alone", (0, 0), (7, 2)] == 1
    assert sum(written) == sum(SIZES.values()) * 8
    assert sorted(written) == [11 * 8, 11 * 8, 13 * 8]


UNTILED = {
    "hole": ([part(3, 0)], [part(1, 3)], "2 of 10 elements are on no rank"),
    "overlap": ([part(3, 0)], [part(3, 2)], r"rank 1 has \[3, 2\] at \[2, 0\], which overlaps"),
    "outside": ([part(3, 0)], [part(2, 4)], r"\[2, 2\] at \[4, 0\] is not inside \[5, 2\]"),
    "twice": ([part(5, 0)], [part(5, 0)], "overlaps"),
    "no first replica": (
        [part(5, 0, replica=1)],
        [part(5, 0, replica=2)],
        "10 of 10 elements are on no rank",
    ),
    "unknown": ([part(5, 0)], [part(1, 0, name="v")], r"'v' is not in shapes\(\)"),
}


@pytest.mark.parametrize("case", UNTILED)
def test_untiled_slices_raise_on_all_ranks(case: str) -> None:
    own, other, problem = UNTILED[case]
    for raised in placed(Held(own), Held(other)):
        with pytest.raises(EngineContractError, match=problem):
            raise raised if isinstance(raised, Exception) else AssertionError("nothing was raised")


def test_ranks_with_differing_names_are_refused() -> None:
    raised, _ = placed(Held([part(5, 0)]), Held([], {"w": (5, 3)}))
    assert isinstance(raised, EngineContractError)
    assert "shapes() differs between ranks" in str(raised)


Cut = Callable[[torch.Tensor], list[tuple[tuple[int, int], torch.Tensor]]]
CUTS: dict[str, Cut] = {
    "one slice": lambda full: [((0, 0), full)],
    "rows": lambda full: [((0, 0), full[:2]), ((2, 0), full[2:])],
    "boxes": lambda full: [((0, 0), full[:3, :1]), ((0, 1), full[:3, 1:]), ((3, 0), full[3:])],
}


@pytest.mark.parametrize("bucket_bytes", [1, 2**20])
@pytest.mark.parametrize("cut", CUTS)
def test_a_lone_rank_puts_its_slices_together(cut: str, bucket_bytes: int) -> None:
    slices = [LocalSlice(name, at, box) for name in ("v", "w") for at, box in CUTS[cut](WHOLE)]
    held = Held(slices, {"v": (5, 2), "w": (5, 2)})
    gather = Gather(world=Comm(), writer=0, bucket_bytes=bucket_bytes)
    found = dict(gather.stream(gather_placements(held, "master", Comm()), slices))
    assert list(found) == ["v", "w"]
    assert all(full is not None and torch.equal(full, WHOLE) for full in found.values())


MANY = torch.arange(48.0).view(16, 3)
SPREAD: dict[str, tuple[Cut, Cut]] = {
    "rows": (lambda full: [((0, 0), full[:6])], lambda full: [((6, 0), full[6:])]),
    "columns": (lambda full: [((0, 0), full[:, :1])], lambda full: [((0, 1), full[:, 1:])]),
    "all on the writer": (lambda full: [((0, 0), full)], lambda full: []),
    "all on the other": (lambda full: [], lambda full: [((0, 0), full)]),
    "boxes": (
        lambda full: [((0, 0), full[:6, :1]), ((6, 0), full[6:9])],
        lambda full: [((0, 1), full[:6, 1:]), ((9, 0), full[9:])],
    ),
}


@pytest.mark.parametrize("bucket_bytes", [8, 40, 2**10])
@pytest.mark.parametrize("cut", SPREAD)
def test_rank_sends_one_bucket_at_once(cut: str, bucket_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, of a tensor that has twice as many bytes as the largest small bucket."""
    messages: Queue[torch.Tensor] = Queue()
    sent: list[int] = []

    def send(message: torch.Tensor, **_: Any) -> None:
        sent.append(message.nbytes)
        messages.put(message.clone())

    monkeypatch.setattr("torch.distributed.send", send)
    monkeypatch.setattr("torch.distributed.recv", lambda into, **_: into.copy_(messages.get(timeout=10)))
    converted: list[int] = []

    def convert(part: LocalSlice) -> torch.Tensor:
        value = part.tensor.bfloat16()
        converted.append(value.nbytes)
        return value

    def gathered(world: Comm) -> torch.Tensor | None:
        slices = [LocalSlice("w", at, box) for at, box in SPREAD[cut][world.rank](MANY)]
        placements = gather_placements(Held(slices, {"w": (16, 3)}), "master", world)
        gather = Gather(
            world=world,
            writer=0,
            convert=convert,
            dtype_of=lambda *_: torch.bfloat16,
            bucket_bytes=bucket_bytes,
        )
        ((_, full),) = gather.stream(placements, slices)
        return full

    full, none = on_ranks(2, gathered)
    assert none is None and torch.equal(full, MANY.bfloat16())
    assert messages.empty() and max(sent, default=0) <= bucket_bytes
    if cut != "all on the writer":  # which needs it whole
        assert max(converted) <= bucket_bytes


class ExportsItself(SupportsOwnExport):
    """A backend that gives full tensors on every rank."""

    def synchronize(self) -> None: ...

    def export_tensors(self, kind: str) -> NamedTensors:
        yield kind, WHOLE

    def import_tensors(self, kind: str, source: TensorSource) -> None: ...


@pytest.mark.parametrize("writer", [0, 1])
def test_the_writer_alone_receives_tensors(writer: int) -> None:
    def received(world: Comm) -> list[bool]:
        backend: Any = ExportsItself()
        return [full is not None for _, full in TensorStore(backend, world, writer).stream("master")]

    assert on_ranks(2, received) == [[rank == writer] for rank in range(2)]
