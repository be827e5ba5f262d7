"""Description of an adapter that a train engine sends (``method="lora"``), and the receiver's check of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from core_rl.config.engine import LoraConfig
from core_rl.errors import WeightsError, raise_all

__all__ = ["AdapterMetadata"]


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
            sent, own = getattr(self, name), getattr(lora, name)
            if sent != own:
                yield f"model.lora.{name} is {sent!r} at the sender and {own!r} here; set both to the same"
        if self.base is not None and self.base != (own := base()):
            yield (
                f"it belongs to another base model (digest {self.base[:8]} at the sender and {own[:8]} here); set "
                "model.path to the base that it is trained on"
            )
