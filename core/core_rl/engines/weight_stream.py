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

import hashlib
import logging
import os
import pickle
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import get_sharing_strategy, set_sharing_strategy

from core_rl.checkpoint.agreement import describe, on_all
from core_rl.engines.meta import TensorKind, WeightUpdateMeta
from core_rl.engines.sent_adapter import SentAdapter
from core_rl.engines.state import EngineState
from core_rl.engines.weight_group import GroupAddress, Invitation, Seats, WeightGroup
from core_rl.errors import ConfigError, CoreRLError, WeightsError
from core_rl.launch.messages import Channel

__all__ = [
    "Bucket",
    "ReceivedWeights",
    "abandon",
    "pickled_by_name",
    "receiving",
    "send_tensors",
    "send_weights",
]

logger = logging.getLogger(__name__)

Bucket = list[tuple[str, Tensor]]
"""Tensors with their names, as views of one piece of shared memory."""
MEET_S = 300.0
"""How long the sender waits for a receiver."""
ANSWER_S = 1800.0
"""How long either side waits for the other one between two messages."""
ALIGNMENT = 64
POLL_S = 0.02
CPU = torch.device("cpu")


# ------------------------------------------------------------------- sending


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
        self._channel = Channel(_connected(_meeting_point(self._meta)))
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
            message: list[Any] = [*_received(self._channel)]
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
            with _shared_by_name():
                self._storage = torch.UntypedStorage._new_shared(max(self._limit, tensor.nbytes, 1))
        start = self._start()
        place = torch.empty(0, dtype=tensor.dtype)
        strides = torch.empty(tensor.shape, device="meta").stride()
        place.set_(self._storage, start // tensor.element_size(), tensor.shape, strides)
        place.copy_(tensor.detach())
        self.tensors.append((name, place))
        self.used = start + tensor.nbytes

    def digest(self) -> str:
        return _digest(self.tensors)


# ----------------------------------------------------------------- receiving


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
            message = _received(self._channel)
        except (EOFError, TimeoutError, ConnectionError) as error:
            raise WeightsError(f"the sender of the weights is gone: {describe(error)}") from error
        if message[0] == "failed":
            raise WeightsError(f"the sender gave up: {message[1]}")
        return message

    def _verify(self, tensors: Bucket, used: int, digest: str | None) -> None:
        if self._meta.verify and (digest is None or digest != _digest(tensors)):
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
    point = _meeting_point(meta)
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
        with _answered(Channel(connection), meta, seats) as received:
            yield received
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def _answered(
    channel: Channel, meta: WeightUpdateMeta, seats: Callable[[], Seats | None]
) -> Iterator[ReceivedWeights]:
    received = ReceivedWeights(channel, meta)
    try:
        received.start(seats() if meta.method == "distributed" else None)
        yield received
        received.answer("installed")
    except BaseException as error:
        with suppress(OSError):
            received.answer("failed", describe(error) if isinstance(error, Exception) else repr(error))
        raise
    finally:
        channel.close()


def abandon(meta: WeightUpdateMeta) -> None:
    """Tell a receiver that waits with the same ``meta`` that no sender will come."""
    with suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        connection.connect(_meeting_point(meta).read_text())


# ------------------------------------------------------------ what both need


def pickled_by_name(value: object) -> bytes:
    """``value`` as bytes in which tensors are names of shared memory that any process on this machine can open."""
    with _shared_by_name():
        return bytes(ForkingPickler.dumps(value))


@contextmanager
def _shared_by_name() -> Iterator[None]:
    """Torch passes file descriptors by default, which only a child of the sender can take."""
    before = get_sharing_strategy()
    set_sharing_strategy("file_system")
    try:
        yield
    finally:
        set_sharing_strategy(before)


def _received(channel: Channel) -> Any:
    return pickle.loads(channel.receive(time.monotonic() + ANSWER_S))  # noqa: S301  # from a rank of the same run


def _meeting_point(meta: WeightUpdateMeta) -> Path:
    if not meta.path:
        raise ConfigError(
            f"WeightUpdateMeta(method={meta.method!r}) needs a path: a file through which sender and receiver meet"
        )
    return Path(meta.path)


def _announce(point: Path, name: str) -> None:
    """Write the socket's name to the file ``point``, at once."""
    point.parent.mkdir(parents=True, exist_ok=True)
    draft = point.with_name(f".{point.name}.{os.getpid()}")
    draft.write_text(name)
    draft.replace(point)


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


def _digest(tensors: Sequence[tuple[str, Tensor]]) -> str:
    found = hashlib.sha256()
    for name, tensor in tensors:
        found.update(name.encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
