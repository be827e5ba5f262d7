"""Colocated Megatron engines in the same rank processes, where Megatron-Core keeps one set of groups."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from typing import Any

import megatron_support as support
import pytest
import torch
from torch import Tensor

from core_rl.backend.loss import LossSpec
from core_rl.config.engine import TrainEngineConfig
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.errors import EngineStateError
from core_rl.launch.group import EngineGroup

LOSS = LossSpec(fn=support.weighted_nll)
CUT = MicroBatchSpec(max_tokens=24)


def config(seed: int, layout: Mapping[str, Any]) -> TrainEngineConfig:
    actual = support.config(layout=layout, model={"attention_dropout": 0.2})
    return actual.model_copy(update={"seed": seed})


def train(group: EngineGroup, step: int) -> float:
    loss = group.train_batch(support.batch(step), LOSS, CUT)["loss"]
    group.offload()
    return loss


def weights(group: EngineGroup) -> dict[str, Tensor]:
    group.onload()
    return group.named_tensors("master")


@pytest.mark.nightly
def test_engines_of_the_same_degrees_share_the_groups() -> None:
    """Each computes the same as alone, with dropout from Megatron's one tracker, also after the other has gone."""
    settings = (config(0, {"tp": 2}), config(1, {"tp": 2}))
    alone = []
    with EngineGroup("megatron", settings[0], timeout_s=120, threads_per_rank=1) as host:
        for local in settings:
            host.initialize(config=local)
            alone.append(([train(host, step) for step in range(3)], weights(host)))
        host.initialize(config=settings[0])
        with EngineGroup("megatron", settings[1], timeout_s=120, colocate_with=host) as guest:
            losses = [[train(group, step) for group in (host, guest)] for step in range(2)]
        actual = [local for local, _ in losses]
        assert [*actual, train(host, 2)] == alone[0][0]
        assert [local for _, local in losses] == alone[1][0][:2]
        assert all(torch.equal(value, alone[0][1][name]) for name, value in weights(host).items())


def test_second_degrees_are_refused_while_in_use() -> None:
    with (
        EngineGroup("megatron", config(0, {"tp": 2}), timeout_s=120, threads_per_rank=1) as host,
        closing(EngineGroup("megatron", config(0, {"pp": 2}), timeout_s=120, colocate_with=host)) as guest,
    ):
        says = r"has Megatron groups for dp=1 tp=2 pp=1 .* needs dp=1 tp=1 pp=2 .*destroy\(\) the other"
        with pytest.raises(EngineStateError, match=says):
            guest.initialize()
        train(host, 0)
        host.destroy()
        guest.initialize()
        train(guest, 0)
