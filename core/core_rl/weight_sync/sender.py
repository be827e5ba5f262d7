"""The sending side of a stream of weights; `core_rl.weight_sync.stream` describes it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from core_rl.backend.meta import WeightUpdateMeta
from core_rl.distributed.agreement import describe, error_of, on_all
from core_rl.distributed.channel import Channel
from core_rl.distributed.comm import Comm
from core_rl.errors import CoreRLError, WeightsError
from core_rl.weight_sync.accelerators import can_open
from core_rl.weight_sync.buckets import Filling, HostStaging
from core_rl.weight_sync.device_memory import shared_with
from core_rl.weight_sync.group import ReceiverRanks, RendezvousServer, WeightGroup
from core_rl.weight_sync.messages import (
    AdapterMetadata,
    Bucket,
    Kind,
    digest_of,
    receive_message,
    send_message,
)
from core_rl.weight_sync.remote_buckets import RemoteBucket, RemoteChannel
from core_rl.weight_sync.rendezvous import connect

__all__ = ["send_tensors", "send_weights"]

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")


def send_weights(
    stream: Iterable[tuple[str, Tensor | None]],
    meta: WeightUpdateMeta,
    comm: Comm,
    *,
    is_writer: bool,
    device: torch.device,
    adapter: AdapterMetadata | None = None,
) -> None:
    """`send_tensors` on all ranks of ``comm``; raises one `WeightsError` on all of them if one fails.

    The writer meets the receiver first, while the others wait for it on the CPU: in a collective of an accelerator,
    they would be taken for hanging. Where that fails, no rank begins the stream.
    """
    subject = f"weights of version {meta.version} were not installed"
    sender = _Sender(meta, device, adapter, None)
    with _told(sender):
        on_all(comm, lambda: sender.connect() if is_writer else None, subject, WeightsError)
    on_all(comm, partial(_send, sender, stream, is_writer), subject, WeightsError)


def send_tensors(
    stream: Iterable[tuple[str, Tensor | None]],
    meta: WeightUpdateMeta,
    *,
    is_writer: bool = True,
    device: torch.device = CPU,
    adapter: AdapterMetadata | None = None,
    on_bucket: Callable[[Bucket], object] | None = None,
) -> None:
    """Send ``stream`` to the caller of `receiving` with the same ``meta``; returns when it is installed there.

    The stream may be collective: it is consumed to its end on every rank, also after an error. Only the rank with
    ``is_writer`` gets tensors and sends them; by ``distributed`` it broadcasts from ``device``, with gloo or nccl. By
    ``lora``, ``adapter`` describes the stream. Raises `WeightsError` with the first error of this rank.

    ``on_bucket`` is called with each bucket that was sent. Its memory is the receiver's to read until the update ends.
    """
    sender = _Sender(meta, device, adapter, on_bucket)
    with _told(sender):
        failure = error_of(sender.connect) if is_writer else None
    _send(sender, stream, is_writer, failure)


@contextmanager
def _told(sender: _Sender) -> Iterator[None]:
    """An error inside the context is reported to the receiver, which waits for the rest."""
    try:
        yield
    except BaseException as error:
        sender.close(describe(error) if isinstance(error, CoreRLError) else f"the export failed: {error!r}")
        raise


def _send(
    sender: _Sender,
    stream: Iterable[tuple[str, Tensor | None]],
    is_writer: bool,
    failure: Exception | None = None,
) -> None:
    """Send ``stream``, which is consumed to its end, and raise ``failure`` or the first one of this rank."""
    with _told(sender):
        for name, tensor in stream:
            if is_writer and failure is None:
                failure = error_of(partial(sender.add, name, tensor))
        if is_writer and failure is None:
            failure = error_of(sender.finish)
    sender.close(None if failure is None else describe(failure))
    if failure is not None:
        raise failure if isinstance(failure, CoreRLError) else WeightsError(describe(failure)) from failure


class _Sender:
    def __init__(
        self,
        meta: WeightUpdateMeta,
        device: torch.device,
        adapter: AdapterMetadata | None,
        on_bucket: Callable[[Bucket], object] | None,
    ) -> None:
        self._meta = meta
        self._device = device
        self._adapter = adapter
        self._on_bucket = on_bucket
        self._channel: Channel | None = None
        self._group: WeightGroup | None = None
        self._bucket = Filling(meta.bucket_bytes, device)
        self._staging = HostStaging()
        self._readers = 0
        """Processes that open each bucket on this device."""
        self._in_use: list[Filling] = []
        """The buckets that were sent and may still be read on this device."""
        self._unacknowledged = 0

    def connect(self) -> None:
        self._channel = connect(self._meta)
        self._send(Kind.HELLO, self._meta.version, self._adapter)
        (ranks,) = self._reply(Kind.READY)
        if ranks is None:
            return
        if self._meta.method == "distributed":
            if isinstance(self._channel, RemoteChannel):
                ranks = replace(ranks, host=self._channel.own_address)
            self._form_group(ranks)
        elif self._device.type == "cuda":
            known = sum(len(server.gpus) for server in ranks.cuda)
            self._readers = known if known == ranks.count and can_open(ranks.cuda, self._device) else 0

    def _form_group(self, ranks: ReceiverRanks) -> None:
        rendezvous = RendezvousServer(ranks, self._device)
        try:
            self._send(Kind.GROUP, rendezvous.address)
            self._group = rendezvous.wait()
        except WeightsError as error:
            self._fall_back(error)
        finally:
            rendezvous.close()

    def _fall_back(self, error: WeightsError) -> None:
        logger.warning("falling back to shared memory for weight version %d: %s", self._meta.version, error)

    def add(self, name: str, tensor: Tensor | None) -> None:
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
            self._reply(Kind.ACK)
        digest = digest_of(tensors) if self._meta.verify else None
        memory = shared_with(self._bucket.flat, self._readers) if self._readers else []
        remote = isinstance(self._channel, RemoteChannel)
        sent = RemoteBucket.of(tensors) if remote else tensors
        self._send(Kind.BUCKET, sent, self._bucket.used, digest, self._group is not None, memory)
        if remote:
            self._send_bytes(tensors)
        self._unacknowledged += 1
        if self._group is not None:
            self._reply(Kind.ALLOW_BROADCAST)
            self._broadcast(self._group, tensors if self._group.on_cpu else self._bucket.tensors)
        if self._on_bucket is not None:
            self._on_bucket(tensors)
        # A bucket is acknowledged when the servers have those before it.
        self._in_use = [*self._in_use[-1:], self._bucket] if memory else []
        self._bucket = Filling(self._meta.bucket_bytes, self._device)

    def _broadcast(self, group: WeightGroup, tensors: Bucket) -> None:
        try:
            for _, tensor in tensors:
                group.broadcast(tensor)
        except WeightsError as error:
            self._fall_back(error)
            self._leave()

    def _leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def finish(self) -> None:
        self._flush()
        if self._unacknowledged:
            self._reply(Kind.ACK)
        self._send(Kind.END)
        self._reply(Kind.INSTALLED)

    def close(self, failure: str | None) -> None:
        self._leave()
        self._in_use.clear()
        if self._channel is not None:
            if failure is not None:
                with suppress(OSError):
                    send_message(self._channel, Kind.FAILED, failure)
            self._channel.close()

    def _send(self, kind: Kind, *fields: object) -> None:
        assert self._channel is not None
        try:
            send_message(self._channel, kind, *fields)
        except ConnectionError:
            # A receiver that has failed closes the connection, and what it sent before is still there.
            while True:
                receive_message(self._channel, "receiver")

    def _send_bytes(self, tensors: Bucket) -> None:
        assert self._channel is not None
        try:
            RemoteBucket.send_bytes(tensors, self._channel)
        except OSError as error:
            raise WeightsError(f"the receiver of the weights is gone: {describe(error)}") from error

    def _reply(self, expected: Kind) -> list[Any]:
        """The other fields of the receiver's next message, which is of the kind ``expected``."""
        assert self._channel is not None
        kind, *fields = receive_message(self._channel, "receiver")
        if kind != expected:
            raise WeightsError(f"the receiver sent {kind!r} instead of {expected!r}")
        self._unacknowledged -= kind == Kind.ACK
        return fields
