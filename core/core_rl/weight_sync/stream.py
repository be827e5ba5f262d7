"""The receiving side of a stream of weights (``method="tensor"``, ``"distributed"``, ``"lora"``).

The rank that writes exports connects to the receiver through the file `WeightUpdateMeta.path`, and sends the tensors in
buckets of shared memory; at most two are in flight. Neither side depends on what the other one is.

By ``tensor`` a sender on a GPU also gives each bucket to ranks of servers on this machine that can open its memory
(CUDA IPC). Shared memory then has the copy for servers that come later.

By ``distributed`` the sender also broadcasts each bucket to the ranks of servers on any machine, as soon as the
receiver has allowed it. Where that group breaks, the receiver falls back to the buckets in shared memory. By ``lora``
the tensors are the adapter's, and are sent as by ``tensor``.

Where the meta names a ``host``, the receiver is on another machine: buckets go there over TCP, into its shared memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch

from core_rl.backend.meta import WeightUpdateMeta
from core_rl.distributed.agreement import describe
from core_rl.distributed.channel import Channel
from core_rl.errors import WeightsError
from core_rl.weight_sync.device_memory import DeviceMemory
from core_rl.weight_sync.group import GroupAddress, ReceiverRanks, WeightGroup
from core_rl.weight_sync.messages import (
    AdapterMetadata,
    Bucket,
    Kind,
    digest_of,
    receive_message,
    send_message,
)
from core_rl.weight_sync.remote_buckets import RemoteBucket, RemoteChannel
from core_rl.weight_sync.rendezvous import accepted, expecting

__all__ = ["Bucket", "ReceivedWeights", "receiving", "receiving_buckets"]


class ReceivedWeights:
    """The buckets of one update, in the sender's order."""

    def __init__(self, channel: Channel, meta: WeightUpdateMeta) -> None:
        self._channel = channel
        self._meta = meta
        self.group: GroupAddress | None = None
        """By ``distributed``: the group that the sender waits for; the receiver's ranks join at once."""
        self.broadcast = False
        """Whether the present bucket is broadcast too, after `allow_broadcast`. Once it is not, no later one is."""
        self.device_memory: Sequence[DeviceMemory] = ()
        """The present bucket on the sender's GPU, for each rank that `receiving` gave; none where they cannot open it.

        It is the ranks' to read until the next bucket but one.
        """
        self.adapter: AdapterMetadata | None = None
        """By ``lora``: the adapter whose factors the tensors are."""

    def __iter__(self) -> Iterator[Bucket]:
        """The buckets; each one is acknowledged when the consumer asks for the next.

        Their memory is the consumer's to read until the update ends.
        Raises `WeightsError` when the sender fails or dies, and for a bucket whose digest is wrong.
        """
        while (message := receive_message(self._channel, "sender"))[0] != Kind.END:
            _, sent, used, digest, self.broadcast, self.device_memory = message
            tensors = self._arrived(sent)
            self._verify(tensors, used, digest)
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

    def start(self, ranks: ReceiverRanks | None) -> None:
        """Exchange the first messages; raises `WeightsError` for weights of another version."""
        _, version, self.adapter = receive_message(self._channel, "sender")
        if version != self._meta.version:
            raise WeightsError(
                f"the sender has weights of version {version}; {self._meta.version} was expected"
            )
        if self._meta.method == "lora" and self.adapter is None:
            raise WeightsError("the sender sent no metadata of its adapter")
        self.reply(Kind.READY, ranks)
        if ranks is not None and self._meta.method == "distributed":
            _, self.group = receive_message(self._channel, "sender")

    def _verify(self, tensors: Bucket, used: int, digest: str | None) -> None:
        if self._meta.verify and (digest is None or digest != digest_of(tensors)):
            raise WeightsError(
                f"{len(tensors)} tensors from {tensors[0][0]!r} on ({used} bytes) did not arrive as they were sent"
            )

    def reply(self, kind: Kind, *fields: object) -> None:
        """Send a message to the sender."""
        send_message(self._channel, kind, *fields)


@contextmanager
def receiving(
    meta: WeightUpdateMeta, timeout_s: float, ranks: Callable[[], ReceiverRanks | None] = lambda: None
) -> Iterator[ReceivedWeights]:
    """The weights of a sender with the same ``meta``; leaving the context reports them as installed.

    ``ranks()`` is called when the sender has connected: for ``distributed``, the ranks that join its group, and for
    ``tensor`` those that may open memory of its GPU; with None the weights come through shared memory alone. An error
    in the context, and one before a sender has connected, is reported to the sender. Raises `WeightsError` when no
    sender connects within ``timeout_s``.
    """
    with expecting(meta), accepted(meta, timeout_s) as channel, _reported(channel, meta, ranks) as weights:
        yield weights


@contextmanager
def receiving_buckets(meta: WeightUpdateMeta, timeout_s: float) -> Iterator[Iterator[Bucket]]:
    """The buckets of one update as copies, received by this process alone; the context is that of `receiving`."""
    with receiving(meta, timeout_s, lambda: ReceiverRanks(count=1, on_cpu=True)) as received:
        if received.group is None:
            yield ([(name, tensor.clone()) for name, tensor in bucket] for bucket in received)
            return
        group = WeightGroup.join(received.group, 1, torch.device("cpu"))
        try:
            yield _broadcast(received, group)
        finally:
            group.close()


def _joining(
    channel: Channel, meta: WeightUpdateMeta, ranks: Callable[[], ReceiverRanks | None]
) -> ReceiverRanks | None:
    """The ranks that join the sender's group, or open its memory; None where buckets through memory are enough."""
    found = ranks() if meta.method in ("tensor", "distributed") else None
    is_remote = isinstance(channel, RemoteChannel)
    return None if found is None or (is_remote and (found.on_cpu or meta.method == "tensor")) else found


def _broadcast(received: ReceivedWeights, group: WeightGroup) -> Iterator[Bucket]:
    for bucket in received:
        received.allow_broadcast()
        yield [(name, group.broadcast(torch.empty_like(tensor))) for name, tensor in bucket]


@contextmanager
def _reported(
    channel: Channel, meta: WeightUpdateMeta, ranks: Callable[[], ReceiverRanks | None]
) -> Iterator[ReceivedWeights]:
    weights = ReceivedWeights(channel, meta)
    try:
        weights.start(_joining(channel, meta, ranks))
        yield weights
        weights.reply(Kind.INSTALLED)
    except BaseException as error:
        with suppress(OSError):
            weights.reply(Kind.FAILED, describe(error) if isinstance(error, Exception) else repr(error))
        raise
    finally:
        channel.close()
