"""Memory that is given back while its contents wait in host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, UntypedStorage

from core_rl.state import memory
from core_rl.state.memory import HostCopies

Steps = list[tuple[str, list[int]]]


class FakeDevice:
    """A module like ``torch.cuda``, which notes its calls and the sizes of ``storages`` at that time."""

    def __init__(self, storages: Sequence[UntypedStorage]) -> None:
        self.storages = storages
        self.steps: Steps = []

    def _note(self, name: str) -> None:
        self.steps.append((name, [storage.nbytes() for storage in self.storages]))

    def current_stream(self, device: torch.device) -> FakeDevice:
        return self

    def synchronize(self) -> None:
        self._note("synchronize")

    def empty_cache(self) -> None:
        self._note("empty_cache")


def tensors() -> list[Tensor]:
    whole = torch.arange(1000.0)
    return [
        whole[:10],
        whole.view(10, 100),
        torch.arange(7),
        torch.zeros(0),
        torch.ones(3, dtype=torch.bfloat16),
    ]


@pytest.mark.parametrize("chunk", [1, 13, 4000, 2**28])
def test_contents_come_back_bit_for_bit(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "CHUNK_BYTES", chunk)
    own, copies = tensors(), HostCopies()
    copies.take(own)
    assert [tensor.untyped_storage().nbytes() for tensor in own] == [0] * len(own)
    copies.give_back()
    for found, expected in zip(own, tensors(), strict=True):
        assert found.equal(expected)


@pytest.fixture
def fake_device(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[Tensor]], FakeDevice]:
    def install(own: list[Tensor]) -> FakeDevice:
        fake = FakeDevice([tensor.untyped_storage() for tensor in own])

        def accelerators(storages: Any) -> Iterator[tuple[torch.device, Any]]:
            yield torch.device("cpu"), fake

        monkeypatch.setattr(memory, "_accelerators", accelerators)
        return fake

    return install


def test_memory_is_freed_after_finished_copies(fake_device: Callable[[list[Tensor]], FakeDevice]) -> None:
    own, copies = [torch.ones(4), torch.ones(2)], HostCopies()
    fake = fake_device(own)
    copies.take(own)
    assert fake.steps == [("synchronize", [16, 8]), ("empty_cache", [0, 0])]
    copies.give_back()
    assert fake.steps[2:] == [("synchronize", [16, 8])], "who calls may use the memory at once"
