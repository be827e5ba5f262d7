"""An update by ``lora``: the factors of an adapter, which come as tensors do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from core_rl.backend.meta import WeightUpdateMeta
from core_rl.config.engine import LoraConfig
from core_rl.distributed.channel import Channel
from core_rl.errors import WeightsError, raise_all
from core_rl.weight_sync.messages import Kind, ReceiverRanks
from core_rl.weight_sync.tensor import ReceivedWeights, TensorUpdate

__all__ = ["AdapterMetadata", "LoraUpdate"]


@dataclass(frozen=True, kw_only=True)
class AdapterMetadata:
    """Properties of an adapter that its factors do not show."""

    rank: int
    alpha: int
    rslora: bool
    base: str | None = None
    """Digest of the weights below it (`digest_of_directory`); None for an update without ``verify``."""

    @staticmethod
    def of(lora: LoraConfig, base: str | None) -> AdapterMetadata:
        """The metadata of an adapter by ``lora`` over the weights with the digest ``base``."""
        return AdapterMetadata(rank=lora.rank, alpha=lora.alpha, rslora=lora.rslora, base=base)

    def require_fit(self, lora: LoraConfig, base: Callable[[], str]) -> None:
        """Raise one `WeightsError` unless it agrees with the receiver's ``lora`` and with ``base()``, its digest."""
        raise_all(WeightsError, "the adapter does not fit this engine", self._violations(lora, base))

    def _violations(self, lora: LoraConfig, base: Callable[[], str]) -> Iterator[str]:
        for name in ("rank", "alpha", "rslora"):
            sent, expected = getattr(self, name), getattr(lora, name)
            if sent != expected:
                yield f"model.lora.{name} is {sent!r} at the sender and {expected!r} here; set both to the same"
        if self.base is not None and self.base != (digest := base()):
            yield (
                f"it belongs to another base model (digest {self.base[:8]} at the sender and {digest[:8]} here); set "
                "model.path to the base that it is trained on"
            )


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
