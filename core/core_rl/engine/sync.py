"""`sync_weights`: weights from a train engine to an inference engine, by any method that both have."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from core_rl.backend.meta import WeightUpdateMeta
from core_rl.engine.inference import InferenceEngine
from core_rl.engine.weight_updates import abandon_until_done

__all__ = ["WeightSender", "sync_weights"]

INTERRUPT_WAIT_S = 2.0
"""Seconds that the receiver may take to end after Ctrl-C in the sender."""


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
    After Ctrl-C the receiver may still be ending; `InferenceEngine.destroy` waits for it.
    """
    if meta.method == "disk":
        sender.upload_weights(meta)
    with receiving or nullcontext():
        arrival = receiver.update_weights(meta)
        try:
            if meta.method != "disk":
                sender.upload_weights(meta)
        except BaseException as error:
            # It may have failed before it connected to the receiver, which would keep waiting.
            limit = math.inf if timeout_s is None else timeout_s
            abandon_until_done(meta, arrival, limit if isinstance(error, Exception) else INTERRUPT_WAIT_S)
            raise
        arrival.result(timeout_s)
