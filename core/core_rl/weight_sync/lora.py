"""An update by ``lora``: the factors of an adapter, which come as tensors do."""

from __future__ import annotations

from collections.abc import Callable

from core_rl.backend.meta import WeightUpdateMeta
from core_rl.distributed.channel import Channel
from core_rl.errors import WeightsError
from core_rl.weight_sync.messages import AdapterMetadata, Kind, ReceiverRanks
from core_rl.weight_sync.tensor import ReceivedWeights, TensorUpdate

__all__ = ["LoraUpdate"]


class LoraUpdate(TensorUpdate):
    """The factors of one adapter over the receiver's weights, through memory."""

    def __init__(self, meta: WeightUpdateMeta, adapter: AdapterMetadata | None = None) -> None:
        """``adapter`` describes the factors, at the sender."""
        super().__init__(meta)
        self.adapter = adapter

    def greet(
        self, received: ReceivedWeights, channel: Channel, ranks: Callable[[], ReceiverRanks | None]
    ) -> None:
        received.read_hello()
        if received.adapter is None:
            raise WeightsError("the sender sent no metadata of its adapter")
        received.reply(Kind.READY, None)
