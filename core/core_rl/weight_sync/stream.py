"""Weights on their way from a train engine to an inference engine (``method="tensor"``, ``"distributed"``, ``"lora"``).

The receiver opens a socket and writes its name to the file `WeightUpdateMeta.path`; the rank that writes exports
connects to it, and passes the tensors in buckets of shared memory, of which two at most are under way.
Neither side knows what the other one is.

By ``distributed`` the sender also broadcasts each bucket to the ranks of servers, wherever they run, as soon as the
receiver has looked at it; the receiver is still on the sender's machine. Where that group breaks, the buckets in
shared memory are what the receiver has to go on with. By ``lora`` the tensors are the adapter's, and go as by
``tensor``.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from core_rl.backend.meta import WeightUpdateMeta
from core_rl.distributed.agreement import describe
from core_rl.distributed.channel import Channel
from core_rl.errors import WeightsError
from core_rl.weight_sync.adapter import SentAdapter
from core_rl.weight_sync.group import GroupAddress, Seats
from core_rl.weight_sync.messages import ANSWER_S, Bucket, digest_of, meeting_point, pickled_by_name, received

__all__ = ["Bucket", "ReceivedWeights", "abandon", "receiving"]


class ReceivedWeights:
    """The buckets of one update, in the order in which they come."""

    def __init__(self, channel: Channel, meta: WeightUpdateMeta) -> None:
        self._channel = channel
        self._meta = meta
        self.group: GroupAddress | None = None
        """By ``distributed``: the group that the sender waits for; whoever was promised a seat joins at once."""
        self.broadcast = False
        """Whether the bucket at hand comes by the group too, after `go`. Once it does not, none will."""
        self.adapter: SentAdapter | None = None
        """By ``lora``: what the tensors are the factors of."""

    def __iter__(self) -> Iterator[Bucket]:
        """The buckets; the next one is asked for when the consumer comes back for it.

        Raises `WeightsError` when the sender gives up or dies, and for a bucket that is not what was sent.
        """
        while (message := self._next())[0] != "end":
            _, tensors, used, digest, self.broadcast = message
            self._verify(tensors, used, digest)
            yield tensors
            with suppress(OSError):  # a sender that is gone may have said why, and that is read next
                self.answer("taken")

    def go(self) -> None:
        """Let the sender broadcast the bucket at hand, tensor by tensor in its order; it waits for this."""
        if self.broadcast:
            self.answer("go")

    def start(self, seats: Seats | None) -> None:
        """Exchange the first messages; raises `WeightsError` for weights of another version."""
        _, version, self.adapter = self._next()
        if version != self._meta.version:
            raise WeightsError(
                f"the sender has weights of version {version}; {self._meta.version} was expected"
            )
        if self._meta.method == "lora" and self.adapter is None:
            raise WeightsError("the sender does not say which adapter it sends")
        self.answer("welcome", seats)
        if seats is not None:
            _, self.group = self._next()

    def _next(self) -> Any:
        try:
            message = received(self._channel)
        except (EOFError, TimeoutError, ConnectionError) as error:
            raise WeightsError(f"the sender of the weights is gone: {describe(error)}") from error
        if message[0] == "failed":
            raise WeightsError(f"the sender gave up: {message[1]}")
        return message

    def _verify(self, tensors: Bucket, used: int, digest: str | None) -> None:
        if self._meta.verify and (digest is None or digest != digest_of(tensors)):
            raise WeightsError(
                f"{len(tensors)} tensors from {tensors[0][0]!r} on ({used} bytes) did not arrive as they were sent"
            )

    def answer(self, *message: object) -> None:
        """Tell the sender."""
        self._channel.send(pickled_by_name(message), time.monotonic() + ANSWER_S)


@contextmanager
def receiving(
    meta: WeightUpdateMeta, timeout_s: float, seats: Callable[[], Seats | None] = lambda: None
) -> Iterator[ReceivedWeights]:
    """What a sender with the same ``meta`` sends. Leaving the context tells it that the weights are installed.

    ``seats()`` is asked when the sender is there: for ``distributed``, who is to join its group; with None the weights
    come in memory alone. An error in the context is told to the sender as well. Raises `WeightsError` when no sender
    comes within ``timeout_s``.
    """
    point = meeting_point(meta)
    directory = Path(tempfile.mkdtemp(prefix="core-rl-"))  # a socket's name must be short
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(directory / "weights"))
            listener.listen(1)
            listener.settimeout(timeout_s)
            _announce(point, str(directory / "weights"))
            try:
                connection, _ = listener.accept()
            except TimeoutError as error:
                raise WeightsError(
                    f"no train engine sent weights of version {meta.version} to {point} within {timeout_s:g} s; "
                    "call its upload_weights() with the same meta"
                ) from error
            finally:
                point.unlink(missing_ok=True)
        with _answered(Channel(connection), meta, seats) as weights:
            yield weights
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def _answered(
    channel: Channel, meta: WeightUpdateMeta, seats: Callable[[], Seats | None]
) -> Iterator[ReceivedWeights]:
    weights = ReceivedWeights(channel, meta)
    try:
        weights.start(seats() if meta.method == "distributed" else None)
        yield weights
        weights.answer("installed")
    except BaseException as error:
        with suppress(OSError):
            weights.answer("failed", describe(error) if isinstance(error, Exception) else repr(error))
        raise
    finally:
        channel.close()


def abandon(meta: WeightUpdateMeta) -> None:
    """Tell a receiver that waits with the same ``meta`` that no sender will come."""
    with suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        connection.connect(meeting_point(meta).read_text())


def _announce(point: Path, name: str) -> None:
    """Write the socket's name to the file ``point``, at once."""
    point.parent.mkdir(parents=True, exist_ok=True)
    draft = point.with_name(f".{point.name}.{os.getpid()}")
    draft.write_text(name)
    draft.replace(point)
