"""Receiving weights in one process: from shared memory, or as the only receiver in a process group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from core_rl.backend.meta import WeightUpdateMeta
from core_rl.weight_sync.group import ReceiverRanks, WeightGroup
from core_rl.weight_sync.stream import Bucket, ReceivedWeights, receiving

__all__ = ["receiving_buckets"]


@contextmanager
def receiving_buckets(meta: WeightUpdateMeta, timeout_s: float) -> Iterator[Iterator[Bucket]]:
    """The buckets of one update, as copies that may be kept; the context is that of `receiving`."""
    with receiving(meta, timeout_s, lambda: ReceiverRanks(count=1)) as received:
        if received.group is None:
            yield ([(name, tensor.clone()) for name, tensor in bucket] for bucket in received)
            return
        group = WeightGroup.join(received.group, 1, torch.device("cpu"))
        try:
            yield _broadcast(received, group)
        finally:
            group.close()


def _broadcast(received: ReceivedWeights, group: WeightGroup) -> Iterator[Bucket]:
    for bucket in received:
        received.allow_broadcast()
        yield [(name, group.broadcast(torch.empty_like(tensor))) for name, tensor in bucket]
