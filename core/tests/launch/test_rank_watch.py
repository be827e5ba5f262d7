"""Waiting for ranks that answer, or end."""

from __future__ import annotations

import os
import socket
import time
from types import SimpleNamespace
from typing import Any

from core_rl.distributed.channel import Channel
from core_rl.launch.pool import Watch


def test_watch_separates_replies_from_ends() -> None:
    ranks: list[Any] = []
    far, ends = [], []
    for number in range(4):
        near, second = socket.socketpair()
        sentinel, end = os.pipe()
        ranks.append(SimpleNamespace(rank=number, channel=Channel(near), sentinel=sentinel))
        far.append(second)
        ends.append(end)
    watch = Watch(ranks)
    started = time.monotonic()
    assert watch.ready(started + 0.2) == []
    assert time.monotonic() - started >= 0.2
    far[1].send(b"answer")
    os.close(ends[2])  # it ended
    far[3].send(b"answer")
    os.close(ends[3])  # it ended after its answer
    notices = [(ranks[1], True), (ranks[2], False), (ranks[3], True)]
    assert watch.ready(time.monotonic() + 60) == notices
    assert watch.ready(time.monotonic() - 1) == notices  # after the deadline too
    watch.drop(ranks[1])
    watch.drop(ranks[3])
    assert watch.ready(time.monotonic() + 60) == [(ranks[2], False)]
    for rank, second in zip(ranks, far, strict=True):
        rank.channel.close()
        second.close()
        os.close(rank.sentinel)
    for end in ends[:2]:
        os.close(end)
