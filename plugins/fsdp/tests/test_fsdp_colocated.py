"""Colocated FSDP engines in the same rank processes."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import fsdp_support as support
import pytest
import torch
from torch import Tensor

from core_rl.backend.loss import LossSpec
from core_rl.config.layout import ParallelLayout
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.engine.train import TrainEngine
from core_rl.launch.group import EngineGroup
from core_rl_fsdp.config import FSDPConfig

LOSS = LossSpec(fn=support.loss, outputs=("logprobs", "entropy"))
CUT = MicroBatchSpec(max_tokens=24)
DP2, TP2 = ParallelLayout(dp=2), ParallelLayout(tp=2)


def config(seed: int, layout: ParallelLayout) -> FSDPConfig:
    dropping: dict[str, Any] = support.TINY | {"attention_dropout": 0.2}
    return support.fsdp_config(layout, model=dropping).model_copy(update={"seed": seed})


def train(group: EngineGroup, step: int) -> float:
    loss = group.train_batch(support.make_batch(step), LOSS, CUT)["loss"]
    group.offload()
    return loss


def weights(group: EngineGroup) -> dict[str, Tensor]:
    group.onload()
    return group.named_tensors("master")


def groups_and_threads(engine: TrainEngine) -> tuple[int, int]:
    """Numbers of process groups and threads of a rank."""
    gc.collect()
    return len(torch.distributed.distributed_c10d._world.pg_map), len(list(Path("/proc/self/task").iterdir()))


@pytest.mark.nightly
@pytest.mark.parametrize("layout", [pytest.param(DP2, marks=pytest.mark.nightly), TP2], ids=str)
def test_colocated_engines_compute_as_if_alone(layout: ParallelLayout) -> None:
    """Next to an engine of the same layout, and to an engine of another layout in the same world."""
    settings = (config(0, DP2), config(1, layout))
    alone = []
    with EngineGroup("fsdp", settings[0], timeout_s=120, threads_per_rank=1) as host:
        for local in settings:
            host.initialize(config=local)
            alone.append(([train(host, step) for step in range(2)], weights(host)))
        host.initialize(config=settings[0])
        before = host.run(groups_and_threads)
        with EngineGroup("fsdp", settings[1], timeout_s=120, colocate_with=host) as guest:
            groups = (host, guest)
            assert (guest.run(groups_and_threads) == before) == (layout == DP2), (
                "meshes are shared where equal"
            )
            losses = [[train(group, step) for group in groups] for step in range(2)]
            for group, actual, (expected, tensors) in zip(
                groups, zip(*losses, strict=True), alone, strict=True
            ):
                assert list(actual) == expected
                assert all(torch.equal(value, tensors[name]) for name, value in weights(group).items())
            guest.destroy()
            assert host.run(groups_and_threads) == before, "an engine takes its groups along"
            guest.initialize()
            assert [train(guest, step) for step in range(2)] == alone[1][0], "in new groups of the same ranks"
            train(host, 2)  # in groups that the other one has left
