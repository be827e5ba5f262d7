"""The channel between the driver and a rank keeps its deadlines."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core_rl.distributed.channel import FRAME_HEADER as HEADER
from core_rl.distributed.channel import JOINED_BYTES, Buffer, Channel

Ends = tuple[socket.socket, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    left, right = socket.socketpair()
    with left, right:
        yield left, right


@given(messages=st.lists(st.lists(st.binary(max_size=300), max_size=4), max_size=4))
def test_messages_arrive_in_order(messages: list[list[bytes]]) -> None:
    left, right = socket.socketpair()
    with left, right:
        for parts in messages:
            Channel(left).send(parts)
        channel = Channel(right)
        actual = [channel.receive(time.monotonic() + 60) for _ in messages]
    assert [[bytes(part) for part in parts] for parts in actual] == messages


@pytest.mark.parametrize(("size", "pieces"), [(100, 1), (JOINED_BYTES, 3)])
def test_small_messages_are_sent_at_once(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, size: int, pieces: int
) -> None:
    sent: list[int] = []
    send = Channel.send_bytes

    def count(channel: Channel, data: Buffer, deadline: float | None) -> None:
        sent.append(len(data))
        send(channel, data, deadline)

    monkeypatch.setattr(Channel, "send_bytes", count)
    parts = [b"stream", bytes(size)]
    sender = threading.Thread(target=Channel(ends[0]).send, args=(parts,))
    sender.start()
    assert [bytes(part) for part in Channel(ends[1]).receive(time.monotonic() + 60)] == parts
    sender.join()
    assert len(sent) == pieces and sum(sent) == 3 * HEADER.size + len(b"stream") + size


def test_a_large_message_passes_a_small_buffer(ends: Ends) -> None:
    payload = bytes(range(256)) * 100_000
    sender = threading.Thread(target=Channel(ends[0]).send, args=([payload],))
    sender.start()
    assert Channel(ends[1]).receive(time.monotonic() + 60) == [payload]
    sender.join()


@pytest.mark.parametrize("sent", [b"", b"\0\0", HEADER.pack(1), HEADER.pack(1) + HEADER.pack(10) + b"12345"])
def test_receive_fails_at_deadline_and_end(ends: Ends, sent: bytes) -> None:
    ends[0].sendall(sent)
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        Channel(ends[1]).receive(started + 0.2)
    assert 0.2 <= time.monotonic() - started < 30
    ends[0].sendall(sent)
    ends[0].close()
    with pytest.raises(EOFError):
        Channel(ends[1]).receive(time.monotonic() + 60)


def test_send_gives_up_at_the_deadline(ends: Ends) -> None:
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        Channel(ends[0]).send([bytes(50_000_000)], started + 0.2)
    assert 0.2 <= time.monotonic() - started < 30


def test_send_to_a_closed_end_fails(ends: Ends) -> None:
    ends[1].close()
    with pytest.raises(BrokenPipeError):
        Channel(ends[0]).send([b"hello"], time.monotonic() + 60)


def test_passed_deadline_is_a_timeout(ends: Ends) -> None:
    with pytest.raises(TimeoutError):
        Channel(ends[1]).receive(time.monotonic() - 1)
