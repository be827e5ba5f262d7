"""The order of copies beside the computation, on a fake device: the calls that a GPU would get."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from core_rl_fsdp.engine import SideCopies

DEVICE = torch.device("meta")


class Stream:
    """Records its calls."""

    def __init__(self, name: str, steps: list[str]) -> None:
        self.name = name
        self.steps = steps
        self.events = 0

    def wait_stream(self, second: Stream) -> None:
        self.steps.append(f"{self.name} waits for {second.name}")

    def record_event(self) -> str:
        self.events += 1
        return f"{self.name}'s event {self.events}"

    def wait_event(self, event: str) -> None:
        self.steps.append(f"{self.name} waits for {event}")


class Module:
    """A module like ``torch.cuda``."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.current = Stream("computation", self.steps)

    def current_stream(self, _device: torch.device) -> Stream:
        return self.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def __getattr__(self, name: str) -> Any:
        assert name == "Stream"
        return lambda _device: Stream("side", self.steps)


class OnDevice(torch.Tensor):
    """A tensor on the CPU that says to be on `DEVICE`."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return DEVICE


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Module:
    actual = Module()
    original_copy, original_to = Tensor.copy_, Tensor.to

    def copy_(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        actual.steps.append(f"{actual.current.name} copies {int(source.flatten()[0])} to the host")
        assert non_blocking
        return original_copy(self, source)

    def to(self: Tensor, device: torch.device, non_blocking: bool = False) -> Tensor:
        actual.steps.append(f"{actual.current.name} copies {int(self.flatten()[0])} to the device")
        assert device == DEVICE and non_blocking
        return original_to(self, DEVICE)

    def record_stream(_: Tensor, stream: Any) -> None:
        actual.steps.append(f"kept for {stream.name}")

    monkeypatch.setattr(torch, "get_device_module", lambda _: actual)
    monkeypatch.setattr(Tensor, "copy_", copy_)
    monkeypatch.setattr(Tensor, "to", to)
    monkeypatch.setattr(Tensor, "record_stream", record_stream)
    return actual


def test_copies_overlap_computation(module: Module) -> None:
    copies = SideCopies()
    packed = [copies.to_host(torch.full((2, 3), float(number)).as_subclass(OnDevice)) for number in range(3)]
    assert module.steps == [
        step
        for number in range(3)
        for step in ("side waits for computation", f"side copies {number} to the host", "kept for side")
    ]
    module.steps.clear()
    for copy in reversed(packed):
        assert copies.to_device(copy).shape == (2, 3)
    assert module.steps == [
        "side copies 2 to the device",
        "computation waits for side's event 1",
        "kept for computation",
        "side copies 1 to the device",  # while the computation uses 2
        "computation waits for side's event 2",
        "kept for computation",
        "side copies 0 to the device",
        "computation waits for side's event 3",
        "kept for computation",
    ]


def test_repeated_copies_reset_with_each_pass(module: Module) -> None:
    copies = SideCopies()
    (first,) = [copies.to_host(torch.zeros(2).as_subclass(OnDevice))]
    copies.forget()
    second = copies.to_host(torch.ones(2).as_subclass(OnDevice))
    module.steps.clear()
    for _ in range(2):
        copies.to_device(second)
    assert [step for step in module.steps if "copies" in step] == ["side copies 1 to the device"] * 2
    assert first.arrival is None
