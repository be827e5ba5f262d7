"""Messages that several ranks of one machine map."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import group_support as support
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from core_rl.distributed.channel import Channel
from core_rl.engine.train import TrainEngine
from core_rl.errors import GroupError
from core_rl.launch import pool
from core_rl.launch.group import EngineGroup
from core_rl.launch.hosts import Hosts, LocalHosts, LocalRank
from core_rl.launch.kept import ALIGNMENT, KeptMessage, Reference
from core_rl_cluster.attach import RehearsalHosts

MIB = 2**20
FILES = Path("/proc/self/fd")


@given(st.lists(st.binary(max_size=200), max_size=6))
def test_buffers_come_back(parts: list[bytes]) -> None:
    retained = KeptMessage.of(parts)
    first, second = retained.reference.open(), retained.reference.open()
    retained.close()
    assert [bytes(part) for part in first] == parts
    for part in first:
        part[:] = bytes(len(part))
        assert torch.frombuffer(part, dtype=torch.uint8).data_ptr() % ALIGNMENT == 0 if part else True
    assert [bytes(part) for part in second] == parts


def test_closed_messages_leave_nothing() -> None:
    before = set(FILES.iterdir())
    retained = KeptMessage.of([b"text"])
    retained.close()
    assert set(FILES.iterdir()) == before
    with pytest.raises(GroupError, match="the memory with the arguments cannot be opened"):
        retained.reference.open()
    with pytest.raises(GroupError, match="run as one user"):
        Reference("/proc/1/fd/99999", (1,)).open()


HOSTS = {"local": LocalHosts, "agents": RehearsalHosts}


@pytest.fixture(scope="module", params=HOSTS)
def group(request: pytest.FixtureRequest) -> Iterator[EngineGroup]:
    make: Any = HOSTS[request.param]
    hosts: Hosts = make() if request.param == "local" else make(machines=2, ranks_per_machine=2)
    with support.echo_group(support.SPEC, support.config(dp=4), timeout_s=120, hosts=hosts) as started:
        yield started
    hosts.close()


def add_one(engine: TrainEngine, value: Tensor) -> float:
    """The argument, changed in place: the ranks' copies are their own."""
    return float(value.add_(1 + support.rank_of(engine)).sum())


@pytest.mark.sampled(2)
def test_equal_arguments_go_to_each_machine_once(group: EngineGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    send = Channel.send_bytes

    def count(channel: Channel, data: Any, deadline: float | None) -> None:
        sent.append(memoryview(data).nbytes)
        send(channel, data, deadline)

    monkeypatch.setattr(Channel, "send_bytes", count)
    value = torch.zeros(MIB)  # 4 MiB
    machines = 1 if isinstance(group.rank_set._hosts, LocalHosts) else 2
    for _ in range(2):
        assert group.run(add_one, value) == [MIB * (1.0 + rank) for rank in range(4)]
    assert value.sum() == 0
    copies = sum(sent) / (2 * value.nbytes)
    # A machine of its own gets them over a connection, and the driver's own through memory.
    assert round(copies, 1) == (0.0 if machines == 1 else 2.0)


def test_without_shared_memory_ranks_get_copies(group: EngineGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(LocalRank, "keep", full)
    monkeypatch.setattr("core_rl_cluster.link.AgentRank.keep", full)
    assert group.run(add_one, torch.zeros(MIB)) == [MIB * (1.0 + rank) for rank in range(4)]


def test_small_arguments_are_sent_to_each(group: EngineGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("a small message was kept")

    monkeypatch.setattr(LocalRank, "keep", never)
    monkeypatch.setattr("core_rl_cluster.link.AgentRank.keep", never)
    value = torch.zeros(pool.KEPT_BYTES // 8)
    assert group.run(add_one, value) == [value.numel() * (1.0 + rank) for rank in range(4)]
