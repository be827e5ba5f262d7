"""`sync_weights`: weights from a train engine to an inference engine, by any method that both have."""

from __future__ import annotations

import math
import time
from concurrent.futures import wait
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from core_rl.backend.meta import WeightUpdateMeta
from core_rl.engine.inference import InferenceEngine
from core_rl.weight_sync.stream import abandon

__all__ = ["WeightSender", "sync_weights"]

POLL_S = 0.1


class WeightSender(Protocol):
    """A `TrainEngine` of one rank, or an `EngineGroup`."""

    def upload_weights(self, meta: WeightUpdateMeta) -> None:
        """Send the weights."""


def sync_weights(
    sender: WeightSender,
    receiver: InferenceEngine,
    meta: WeightUpdateMeta,
    timeout_s: float | None = None,
    receiving: AbstractContextManager[None] | None = None,
) -> None:
    """Give ``receiver`` the weights of ``sender`` as ``meta.version``; returns when it has them.

    It receives them inside the context ``receiving``, such as a pause of its requests. Files are written before that;
    by other methods both sides work at the same time, inside it.

    Raises what either side raises; then the receiver has the weights and the version that it had. Where both fail,
    it is the sender's error, with the receiver's as its context. `TimeoutError` after ``timeout_s`` seconds.
    """
    if meta.method == "disk":
        sender.upload_weights(meta)
    with receiving or nullcontext():
        arrival = receiver.update_weights(meta)
        try:
            if meta.method != "disk":
                sender.upload_weights(meta)
        except BaseException:
            # It may have failed before it connected to the receiver, which would keep waiting.
            deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
            while not arrival.done() and time.monotonic() < deadline:
                abandon(meta)
                wait([arrival], POLL_S)
            raise
        arrival.result(timeout_s)
