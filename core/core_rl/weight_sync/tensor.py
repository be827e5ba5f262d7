"""An update by ``tensor`` or ``lora``: `TensorUpdate`, with `send` for a train and `receive` for an inference engine.

The rank that writes exports connects to the receiver through the file `WeightUpdateMeta.path`, and sends the tensors in
buckets of shared memory; at most two are in flight. Neither side depends on the kind of the other.

A sender on a GPU also gives each bucket to ranks of servers on this machine that can open its memory (CUDA IPC). Shared
memory then has the copy for servers that come later. With a ``host`` in the meta of ``lora`` and ``distributed``, the
receiver is on another machine: buckets go there over TCP, into its shared memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from core_rl.backend.meta import WeightUpdateMeta
from core_rl.distributed.agreement import describe, error_of, on_all
from core_rl.distributed.channel import Channel
from core_rl.distributed.comm import Comm
from core_rl.errors import CoreRLError, WeightsError
from core_rl.weight_sync.buckets import Filling, HostStaging, RemoteBucket
from core_rl.weight_sync.cuda import DeviceMemory, can_open, shared_with
from core_rl.weight_sync.delta import DeltaBase, require_base
from core_rl.weight_sync.messages import (
    AdapterMetadata,
    Bucket,
    GroupAddress,
    Kind,
    ReceiverRanks,
    RemoteChannel,
    digest_of,
    receive_message,
    send_message,
)
from core_rl.weight_sync.rendezvous import accepted, connect, expecting

__all__ = ["ReceivedWeights", "Sender", "TensorStream", "TensorUpdate"]

TensorStream = Iterable[tuple[str, Tensor | None]]
"""Names with full tensors, or None on ranks that do not send. Iterating may be collective."""
CPU = torch.device("cpu")
FIRST_BYTES, GROWTH = 4 * 2**20, 4
"""The largest first bucket, and the factor of each later one: the system reserves the memory of a bucket as a whole,
which takes 0.1 s for 256 MiB."""


@dataclass(eq=False)
class TensorUpdate:
    """One update of weights through memory. Each side makes the object from the same ``meta``."""

    meta: WeightUpdateMeta
    adapter: AdapterMetadata | None = None
    """The adapter whose factors are sent, at the sender by ``lora``."""
    base: DeltaBase | None = None
    """With ``meta.delta``, the weights that this side has: changes are since the sender's, and the receiver refuses
    them (`DeltaRefused`) where it has others."""

    # ------------------------------------------------------------- the sender

    def send(
        self,
        stream: TensorStream,
        comm: Comm | None = None,
        *,
        is_writer: bool = True,
        device: torch.device = CPU,
        on_bucket: Callable[[Bucket], object] | None = None,
    ) -> None:
        """Send ``stream`` to the caller of `receive`; returns on all ranks of ``comm`` when it is installed there.

        The rank with ``is_writer`` gets the tensors and sends them from ``device``. It meets the receiver first, while
        the others wait for it on the CPU: in a collective of an accelerator, their watchdog would end them. Where
        that fails, no rank begins the stream; a stream that has begun is consumed to its end, also after an error.
        Raises one `WeightsError` on all ranks if one fails.

        ``on_bucket`` is called with each bucket that was sent. Its memory is the receiver's to read until the update
        ends, and for servers that come later.
        """
        subject = f"weights of version {self.meta.version} were not installed"
        comm, sender = comm or Comm(), self.sender(device, on_bucket)
        with sender.reporting():
            on_all(comm, lambda: sender.connect() if is_writer else None, subject, WeightsError)
        on_all(comm, partial(sender.send_all, stream, is_writer), subject, WeightsError)

    def sender(self, device: torch.device, on_bucket: Callable[[Bucket], object] | None) -> Sender:
        """The sender of the writing rank."""
        return Sender(self, device, on_bucket)

    # ----------------------------------------------------------- the receiver

    @contextmanager
    def receive(
        self, timeout_s: float, ranks: Callable[[], ReceiverRanks | None] = lambda: None
    ) -> Iterator[ReceivedWeights]:
        """The weights of a sender; leaving the context reports them as installed.

        ``ranks()`` is called when the sender has connected: the ranks that may open memory of its GPU, or by
        ``distributed`` join its group; with None the weights come through shared memory alone. Errors in the context,
        and before a sender has connected, are reported to the sender. Raises `WeightsError` when no sender connects
        within ``timeout_s``.
        """
        with expecting(self.meta), accepted(self.meta, timeout_s) as channel:
            received = ReceivedWeights(channel, self.meta, self.base)
            try:
                self.greet(received, channel, ranks)
                yield received
                received.reply(Kind.INSTALLED)
            except BaseException as error:
                with suppress(OSError):
                    received.reply(
                        Kind.FAILED, describe(error) if isinstance(error, Exception) else repr(error)
                    )
                raise
            finally:
                channel.close()

    @contextmanager
    def receive_copies(self, timeout_s: float) -> Iterator[Iterator[Bucket]]:
        """The buckets as copies, received by this process alone; the context is that of `receive`."""
        with self.receive(timeout_s) as received:
            yield ([(name, tensor.clone()) for name, tensor in bucket] for bucket in received)

    def greet(
        self, received: ReceivedWeights, channel: Channel, ranks: Callable[[], ReceiverRanks | None]
    ) -> None:
        """Exchange the first messages; raises as `ReceivedWeights.read_hello`."""
        received.read_hello()
        received.reply(Kind.READY, ranks())


class Sender:
    """The connection of the writing rank, and the bucket that it fills."""

    def __init__(
        self, update: TensorUpdate, device: torch.device, on_bucket: Callable[[Bucket], object] | None
    ) -> None:
        self.meta = update.meta
        self.device = device
        self.broadcasts = False
        """Whether buckets are broadcast too."""
        self._adapter, self._base = update.adapter, update.base
        self._on_bucket = on_bucket
        self._channel: Channel | None = None
        self._limit = min(self.meta.bucket_bytes, FIRST_BYTES)
        self._bucket = Filling(self._limit, device)
        self._staging = HostStaging()
        self._readers = 0
        """Processes that open each bucket on this device."""
        self._in_use: list[Filling] = []
        """The buckets that were sent and may still be read on this device."""
        self._unacknowledged = 0

    def connect(self) -> None:
        """Meet the receiver."""
        self._channel = connect(self.meta)
        self.post(Kind.HELLO, self.meta.version, self._adapter, self._base)
        (ranks,) = self.reply(Kind.READY)
        if ranks is not None:
            self.share_with(ranks, self._channel)

    def share_with(self, ranks: ReceiverRanks, channel: Channel) -> None:
        """Prepare what only ``ranks`` of servers can read."""
        if self.device.type == "cuda":
            known = sum(len(server.gpus) for server in ranks.cuda)
            self._readers = known if known == ranks.count and can_open(ranks.cuda, self.device) else 0

    def send_all(self, stream: TensorStream, is_writer: bool) -> None:
        """Send ``stream``, which is consumed to its end, and raise the first error of this rank."""
        failure: Exception | None = None
        with self.reporting():
            for name, tensor in stream:
                if is_writer and failure is None:
                    failure = error_of(partial(self._add, name, tensor))
            if is_writer and failure is None:
                failure = error_of(self._finish)
        self.close(None if failure is None else describe(failure))
        if failure is not None:
            raise failure

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Report an error inside the context to the receiver, which waits for the rest."""
        try:
            yield
        except BaseException as error:
            self.close(describe(error) if isinstance(error, CoreRLError) else f"the export failed: {error!r}")
            raise

    def _add(self, name: str, tensor: Tensor | None) -> None:
        if tensor is None:
            raise WeightsError(f"the export gave no data for {name!r} on the rank that sends")
        if not self._bucket.fits(tensor):
            self._flush()
        self._bucket.add(name, tensor)

    def _flush(self) -> None:
        if not self._bucket.tensors:
            return
        tensors = self._bucket.shared(self._staging)
        if self._unacknowledged:
            self.reply(Kind.ACK)
        digest = digest_of(tensors) if self.meta.verify else None
        memory = shared_with(self._bucket.flat, self._readers) if self._readers else []
        remote = isinstance(self._channel, RemoteChannel)
        sent = RemoteBucket.of(tensors) if remote else tensors
        self.post(Kind.BUCKET, sent, self._bucket.used, digest, self.broadcasts, memory)
        if remote:
            assert self._channel is not None
            try:
                RemoteBucket.send_bytes(tensors, self._channel)
            except OSError as error:
                raise WeightsError(f"the receiver of the weights is gone: {describe(error)}") from error
        self._unacknowledged += 1
        self.after_bucket(tensors, self._bucket.tensors)
        if self._on_bucket is not None:
            self._on_bucket(tensors)
        # A bucket is acknowledged when the servers have those before it.
        self._in_use = [*self._in_use[-1:], self._bucket] if memory else []
        self._limit = min(self.meta.bucket_bytes, GROWTH * self._limit)
        self._bucket = Filling(self._limit, self.device)

    def after_bucket(self, tensors: Bucket, on_device: Bucket) -> None:
        """Do what follows the message of a bucket: ``tensors`` in shared memory, and ``on_device``."""

    def _finish(self) -> None:
        self._flush()
        if self._unacknowledged:
            self.reply(Kind.ACK)
        self.post(Kind.END)
        self.reply(Kind.INSTALLED)

    def close(self, failure: str | None) -> None:
        """Close the connection; ``failure`` is reported to the receiver."""
        self._in_use.clear()
        if self._channel is not None:
            if failure is not None:
                with suppress(OSError):
                    send_message(self._channel, Kind.FAILED, failure)
            self._channel.close()

    def post(self, kind: Kind, *fields: object) -> None:
        """Send a message, or raise the error that the receiver has sent before it closed the connection."""
        assert self._channel is not None
        try:
            send_message(self._channel, kind, *fields)
        except ConnectionError:
            while True:
                receive_message(self._channel, "receiver")

    def reply(self, expected: Kind) -> list[Any]:
        """The other fields of the receiver's next message, which is of the kind ``expected``."""
        assert self._channel is not None
        kind, *fields = receive_message(self._channel, "receiver")
        if kind != expected:
            raise WeightsError(f"the receiver sent {kind!r} instead of {expected!r}")
        self._unacknowledged -= kind == Kind.ACK
        return fields


class ReceivedWeights:
    """The buckets of one update, in the sender's order."""

    def __init__(self, channel: Channel, meta: WeightUpdateMeta, present: DeltaBase | None = None) -> None:
        self._channel = channel
        self._meta = meta
        self._present = present
        self.base: DeltaBase | None = None
        """With ``delta``: the weights that the changes are since; None for a full update."""
        self.group: GroupAddress | None = None
        """By ``distributed``: the group that the sender waits for; the receiver's ranks join at once."""
        self.broadcast = False
        """Whether the present bucket is broadcast too, after `allow_broadcast`. Once it is not, no later one is."""
        self.device_memory: Sequence[DeviceMemory] = ()
        """The present bucket on the sender's GPU, for each rank that `receive` gave; none where they cannot open it.

        It is the ranks' to read until the next bucket but one.
        """
        self.adapter: AdapterMetadata | None = None
        """By ``lora``: the adapter whose factors the tensors are."""

    def __iter__(self) -> Iterator[Bucket]:
        """The buckets; each one is acknowledged when the consumer asks for the next.

        Their memory is the consumer's to read until the update ends.
        Raises `WeightsError` when the sender fails or dies, and for a bucket whose digest is wrong.
        """
        while (message := self.next_message())[0] != Kind.END:
            _, sent, used, digest, self.broadcast, self.device_memory = message
            tensors = self._arrived(sent)
            if self._meta.verify and (digest is None or digest != digest_of(tensors)):
                raise WeightsError(
                    f"{len(tensors)} tensors from {tensors[0][0]!r} on ({used} bytes) did not arrive as they were sent"
                )
            yield tensors
            with suppress(OSError):  # a sender that is gone may have sent its error, which is read next
                self.reply(Kind.ACK)

    def _arrived(self, sent: Bucket | RemoteBucket) -> Bucket:
        """A bucket in memory of this machine."""
        if not isinstance(sent, RemoteBucket):
            return sent
        try:
            return sent.receive(self._channel)
        except (EOFError, OSError) as error:
            raise WeightsError(f"the sender of the weights is gone: {describe(error)}") from error

    def allow_broadcast(self) -> None:
        """Let the sender broadcast the present bucket, tensor by tensor in its order; it waits for this."""
        if self.broadcast:
            self.reply(Kind.ALLOW_BROADCAST)

    def read_hello(self) -> None:
        """Read the sender's first message; raises `WeightsError` for another version, or ``lora`` without metadata.

        Raises `DeltaRefused` for changes since other weights.
        """
        _, version, self.adapter, self.base = self.next_message()
        if version != self._meta.version:
            raise WeightsError(
                f"the sender has weights of version {version}; {self._meta.version} was expected"
            )
        if self._meta.method == "lora" and self.adapter is None:
            raise WeightsError("the sender sent no metadata of its adapter")
        require_base(self.base, self._present)

    def next_message(self) -> tuple[Any, ...]:
        return receive_message(self._channel, "sender")

    def reply(self, kind: Kind, *fields: object) -> None:
        send_message(self._channel, kind, *fields)
