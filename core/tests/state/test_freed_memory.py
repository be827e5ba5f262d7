"""Memory freed in a step leaves the process."""

from __future__ import annotations

import sys
from pathlib import Path

import engine_support as support
import pytest
import torch

from core_rl.backend.loss import LossSpec
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.state.memory import give_back_freed

MIB = 2**20
BLOCKS = 256


def resident() -> int:
    """Anonymous memory of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_freed_blocks_are_given_back() -> None:
    torch.ones(16 * MIB // 4)  # freed: from now on glibc takes blocks of 1 MiB from its heap
    large, small = [], []
    for _ in range(BLOCKS):
        large.append(torch.ones(MIB // 4))
        small.append(torch.ones(50_000))  # too large for the gaps that there are
    full = resident()
    large.clear()
    retained = resident()
    give_back_freed()
    assert full - retained < BLOCKS * MIB // 2 < retained - resident(), [full, retained, resident()]
    assert all(tensor.all() for tensor in small)


def test_engine_gives_memory_back_after_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for place in ("train", "step"):
        monkeypatch.setattr(
            f"core_rl.engine.{place}.give_back_freed", lambda place=place: calls.append(place)
        )
    engine = support.engine()
    engine.train_batch(support.batch(), LossSpec(fn=support.weighted_nll), MicroBatchSpec(count=2))
    engine.destroy()
    assert calls == ["train", "step"]
