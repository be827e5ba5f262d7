"""Colocated groups: several engines in one set of rank processes, each as if it were alone there."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engine_support
import group_support as support
import pytest
import torch
from torch import Tensor

from core_rl.backend.loss import LossSpec
from core_rl.backend.meta import TensorKind
from core_rl.config.engine import ModelConfig
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.errors import (
    ConfigError,
    CoreRLError,
    EngineStateError,
    GroupError,
    LayoutError,
    RankDied,
    RankFailed,
)
from core_rl.launch.group import EngineGroup
from core_rl.reference import ReferenceConfig

Pair = tuple[EngineGroup, EngineGroup]


def colocated(host: EngineGroup, seed: int = 2, **degrees: int) -> EngineGroup:
    return support.echo_group(
        support.SPEC, support.config(seed, **(degrees or {"dp": 2})), timeout_s=120, colocate_with=host
    )


@pytest.fixture
def pair() -> Iterator[Pair]:
    with (
        support.echo_group(support.SPEC, support.config(1, dp=2), timeout_s=120) as host,
        colocated(host) as guest,
    ):
        yield host, guest


# ------------------------------------------------------------------ one set of processes


def test_colocated_groups_have_separate_engines(pair: Pair) -> None:
    host, guest = pair
    assert host.pids == guest.pids
    host.onload()
    assert host.run(support.calls) == [["onload"]] * 2
    assert guest.run(support.calls) == [[]] * 2
    assert [group.run(support.surroundings)[0]["world"] for group in pair] == [(2, 0, 120.0)] * 2
    guest.destroy()
    with pytest.raises(EngineStateError, match="no engine"):
        guest.run(support.calls)
    assert host.run(support.calls) == [["onload"]] * 2


@pytest.mark.parametrize("first", [0, 1], ids=["the host", "the guest"])
def test_processes_end_with_the_last_group(pair: Pair, first: int) -> None:
    closed, second = pair[first], pair[1 - first]
    pids = second.pids
    closed.close()
    for call in (lambda: closed.run(support.whoami), closed.initialize, lambda: colocated(closed)):
        with pytest.raises(GroupError, match="this group has ended: it was closed"):
            call()
    assert second.run(support.whoami) == [(0,), (1,)]
    second.close()
    assert not support.survivors(pids, within_s=0)


def test_dead_rank_ends_all_colocated_groups(pair: Pair) -> None:
    host, guest = pair
    pids = host.pids
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(RankDied, match="rank 1 was killed by SIGKILL"):
        guest.run(support.whoami)
    messages = set()
    for group in pair:
        with pytest.raises(GroupError) as caught:
            group.run(support.whoami)
        messages.add(str(caught.value))
    (message,) = messages
    assert "ended: whoami failed with RankDied: rank 1 was killed by SIGKILL" in message
    assert not support.survivors(pids, within_s=0)


def test_restart_covers_all_colocated_groups(pair: Pair) -> None:
    host, guest = pair
    pids = host.pids
    guest.restart()
    assert not support.survivors(pids, within_s=0)
    for group in pair:
        with pytest.raises(EngineStateError, match="no engine; call initialize"):
            group.run(support.whoami)
        group.initialize()
        assert group.run(support.whoami) == [(0,), (1,)]
    assert host.pids == guest.pids != pids
    host.close()
    assert guest.run(support.whoami) == [(0,), (1,)]


def test_colocated_groups_refuse_concurrent_calls(pair: Pair, tmp_path: Path) -> None:
    host, guest = pair
    thread = threading.Thread(target=host.run, args=(support.arrive_and_wait, str(tmp_path)))
    thread.start()
    support.await_arrival(tmp_path)
    with pytest.raises(GroupError, match="whoami: another call .* is running, or on a colocated group"):
        guest.run(support.whoami)
    with pytest.raises(GroupError, match="that is colocated with this one is in a call"):
        guest.close()
    support.let_go(tmp_path)
    thread.join()
    assert guest.run(support.whoami) == [(0,), (1,)]


def test_failed_engine_leaves_colocated_engines_alone(pair: Pair) -> None:
    host, guest = pair
    with pytest.raises(RankFailed, match="no memory for the model"):
        guest.initialize(config=support.config(support.FAILING_SEED, dp=2))
    assert host.run(support.whoami) == [(0,), (1,)]
    guest.initialize(config=support.config(dp=2))
    assert guest.run(support.whoami) == [(0,), (1,)]


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"devices": (0, 1)}, ConfigError, "give them to the group that starts the processes"),
        ({"threads_per_rank": 1}, ConfigError, "give them to the group that starts the processes"),
        (
            {"config": support.config(dp=4)},
            LayoutError,
            "layout dp4 has 4 ranks, and the colocated group has 2",
        ),
    ],
    ids=["devices", "threads", "ranks"],
)
def test_colocated_groups_refuse_process_settings(
    pair: Pair, settings: dict[str, Any], error: type[CoreRLError], says: str
) -> None:
    with pytest.raises(error, match=says):
        support.echo_group(
            support.SPEC, colocate_with=pair[0], **({"config": support.config(dp=2)} | settings)
        )
    assert pair[1].run(support.whoami) == [(0,), (1,)]


def test_new_world_size_needs_destroyed_peers(pair: Pair) -> None:
    host, guest = pair
    with pytest.raises(EngineStateError, match=r"needs 1 ranks, .* has 2; destroy\(\) that one first"):
        host.initialize(config=support.config(dp=1))
    assert host.run(support.whoami) == guest.run(support.whoami) == [(0,), (1,)]
    guest.destroy()
    host.initialize(config=support.config(dp=1))
    assert host.run(support.whoami) == [(0,)]


# ------------------------------------------------------------------ real engines

LOSS = LossSpec(fn=engine_support.weighted_nll)
STEPS = range(3)


def dropping(seed: int) -> ReferenceConfig:
    model = ModelConfig(config=engine_support.TINY | {"attention_dropout": 0.3})
    return ReferenceConfig(model=model, optimizer=engine_support.OPTIMIZER, seed=seed)


def train(group: EngineGroup, step: int) -> float:
    return group.train_batch(engine_support.batch(step), LOSS, MicroBatchSpec(count=2))["loss"]


def state(group: EngineGroup) -> dict[str, Tensor]:
    group.onload()
    kinds: tuple[TensorKind, ...] = ("master", "exp_avg", "exp_avg_sq")
    return {f"{kind}/{name}": t for kind in kinds for name, t in group.named_tensors(kind).items()}


def test_colocated_engine_computes_as_if_alone() -> None:
    """With dropout, and in host memory while the other one works."""
    alone = []
    with EngineGroup("reference", dropping(0), timeout_s=120, threads_per_rank=1) as host:
        for seed in (0, 1):
            host.initialize(config=dropping(seed))
            alone.append(([train(host, step) for step in STEPS], state(host)))
        host.initialize(config=dropping(0))
        with EngineGroup("reference", dropping(1), timeout_s=120, colocate_with=host) as guest:
            losses: tuple[list[float], list[float]] = ([], [])
            for step in STEPS:
                for local, group in zip(losses, (host, guest), strict=True):
                    local.append(train(group, step))
                    group.offload()
            for local, group, (expected, tensors) in zip(losses, (host, guest), alone, strict=True):
                assert local == expected
                actual = state(group)
                torch.testing.assert_close(actual, tensors, rtol=0, atol=0)
