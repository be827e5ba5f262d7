"""The sending side of a stream of weights, see `core_rl.weight_sync.stream`."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core_rl.backend.meta import TensorKind, WeightUpdateMeta
from core_rl.distributed.agreement import describe, on_all
from core_rl.distributed.channel import Channel
from core_rl.engine.state import EngineState
from core_rl.errors import CoreRLError, WeightsError
from core_rl.weight_sync.adapter import SentAdapter
from core_rl.weight_sync.group import Invitation, Seats, WeightGroup
from core_rl.weight_sync.messages import (
    ANSWER_S,
    Bucket,
    digest_of,
    meeting_point,
    pickled_by_name,
    received,
    shared_by_name,
)

__all__ = ["send_tensors", "send_weights"]

logger = logging.getLogger(__name__)

MEET_S = 300.0
"""How long the sender waits for a receiver."""
ALIGNMENT = 64
POLL_S = 0.02
CPU = torch.device("cpu")


def send_weights(engine: EngineState, meta: WeightUpdateMeta) -> None:
    """Send the parameters and saved buffers of ``engine``, or its adapter; collective. Returns when they are installed.

    Raises one `WeightsError` on all ranks if the receiver does not come, gives up, or refuses them.
    """
    adapter = SentAdapter.of(engine, meta.verify) if meta.method == "lora" else None
    kinds: tuple[TensorKind, ...] = ("params",) if adapter is None else ("adapter",)
    if adapter is None and engine.tensor_shapes("buffers"):
        kinds = ("params", "buffers")
    stream = (item for kind in kinds for item in engine.named_tensors(kind))
    subject = f"weights of version {meta.version} were not installed"
    sends, device = engine.is_writer, engine.device

    def send() -> None:
        send_tensors(stream, meta, sends=sends, device=device, adapter=adapter)

    on_all(engine.world, send, subject, WeightsError)


def send_tensors(
    stream: Iterable[tuple[str, Tensor | None]],
    meta: WeightUpdateMeta,
    *,
    sends: bool = True,
    device: torch.device = CPU,
    adapter: SentAdapter | None = None,
) -> None:
    """Send ``stream`` to whoever calls `receiving` with the same ``meta``; returns when it is installed there.

    The stream may be collective: it is consumed to its end on every rank, also after an error, and only the rank
    where ``sends`` is true receives tensors and sends them; by ``distributed`` it broadcasts from ``device``, with gloo
    or nccl. By ``lora``, ``adapter`` says what the stream is. Raises `WeightsError` with the first error of this rank.
    """
    sender = _Sender(meta, device, adapter)
    failure: Exception | None = None
    try:
        failure = _failure_of(sender.connect) if sends else None
        for name, tensor in stream:
            if sends and failure is None:
                failure = _failure_of(partial(sender.add, name, tensor))
        if sends and failure is None:
            failure = _failure_of(sender.finish)
    except BaseException as error:  # of the export itself: whoever waits for the rest is told
        sender.close(f"the export failed: {error!r}")
        raise
    sender.close(None if failure is None else describe(failure))
    if failure is not None:
        raise failure if isinstance(failure, CoreRLError) else WeightsError(describe(failure)) from failure


def _failure_of(step: Callable[[], None]) -> Exception | None:
    try:
        step()
    except Exception as error:  # noqa: BLE001  # the other ranks are in the middle of the stream
        return error
    return None


class _Sender:
    def __init__(self, meta: WeightUpdateMeta, device: torch.device, adapter: SentAdapter | None) -> None:
        self._meta = meta
        self._device = device
        self._adapter = adapter
        self._channel: Channel | None = None
        self._group: WeightGroup | None = None
        self._bucket = _Filling(meta.bucket_bytes)
        self._unanswered = 0

    def connect(self) -> None:
        self._channel = Channel(_connected(meeting_point(self._meta)))
        self._send("hello", self._meta.version, self._adapter)
        (seats,) = self._answer("welcome")
        if seats is not None:
            self._invite(seats)

    def _invite(self, seats: Seats) -> None:
        invitation = Invitation(seats, self._device)
        try:
            self._send("group", invitation.address)
            self._group = invitation.wait()
        except WeightsError as error:
            logger.warning("weights of version %d go on in memory: %s", self._meta.version, error)
        finally:
            invitation.close()

    def add(self, name: str, tensor: Tensor | None) -> None:
        if tensor is None:
            raise WeightsError(f"the export gave no data for {name!r} on the rank that sends")
        if not self._bucket.fits(tensor):
            self._flush()
        self._bucket.add(name, tensor)

    def _flush(self) -> None:
        if not self._bucket.tensors:
            return
        if self._unanswered:
            self._answer("taken")
        digest = self._bucket.digest() if self._meta.verify else None
        self._send("bucket", self._bucket.tensors, self._bucket.used, digest, self._group is not None)
        self._unanswered += 1
        if self._group is not None:
            self._answer("go")
            self._broadcast(self._group)
        self._bucket = _Filling(self._meta.bucket_bytes)

    def _broadcast(self, group: WeightGroup) -> None:
        try:
            for _, tensor in self._bucket.tensors:
                group.broadcast(tensor)
        except WeightsError as error:
            logger.warning("weights of version %d go on in memory: %s", self._meta.version, error)
            self._leave()

    def _leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def finish(self) -> None:
        self._flush()
        if self._unanswered:
            self._answer("taken")
        self._send("end")
        self._answer("installed")

    def close(self, failure: str | None) -> None:
        self._leave()
        if self._channel is not None:
            if failure is not None:
                with suppress(OSError):
                    self._send("failed", failure)
            self._channel.close()

    def _send(self, *message: object) -> None:
        assert self._channel is not None
        self._channel.send(pickled_by_name(message), time.monotonic() + ANSWER_S)

    def _answer(self, expected: str) -> list[Any]:
        """What the receiver says beside the word ``expected``."""
        assert self._channel is not None
        try:
            message: list[Any] = [*received(self._channel)]
        except (EOFError, TimeoutError, ConnectionError) as error:
            raise WeightsError(f"the receiver of the weights is gone: {describe(error)}") from error
        kind, *rest = message
        if kind == "failed":
            raise WeightsError(f"the receiver refused the weights: {rest[0]}")
        if kind != expected:
            raise WeightsError(f"the receiver answered {kind!r} instead of {expected!r}")
        self._unanswered -= kind == "taken"
        return rest


class _Filling:
    """A bucket that is filled: one piece of shared memory, of which untouched pages take no room."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._storage: torch.UntypedStorage | None = None
        self.tensors: Bucket = []
        self.used = 0

    def fits(self, tensor: Tensor) -> bool:
        """A tensor that is larger than the limit gets a bucket of its own."""
        return not self.tensors or self._start() + tensor.nbytes <= self._limit

    def _start(self) -> int:
        return -(-self.used // ALIGNMENT) * ALIGNMENT

    def add(self, name: str, tensor: Tensor) -> None:
        if self._storage is None:
            with shared_by_name():
                self._storage = torch.UntypedStorage._new_shared(max(self._limit, tensor.nbytes, 1))
        start = self._start()
        place = torch.empty(0, dtype=tensor.dtype)
        strides = torch.empty(tensor.shape, device="meta").stride()
        place.set_(self._storage, start // tensor.element_size(), tensor.shape, strides)
        place.copy_(tensor.detach())
        self.tensors.append((name, place))
        self.used = start + tensor.nbytes

    def digest(self) -> str:
        return digest_of(self.tensors)


def _connected(point: Path) -> socket.socket:
    deadline = time.monotonic() + MEET_S
    while time.monotonic() < deadline:
        with suppress(FileNotFoundError, ConnectionRefusedError):
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(point.read_text())
            except OSError:
                connection.close()
                raise
            return connection
        time.sleep(POLL_S)
    raise WeightsError(
        f"no inference engine waits for weights at {point} after {MEET_S:g} s; call its update_weights() with the "
        "same meta first: it returns at once"
    )
