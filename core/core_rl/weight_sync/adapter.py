"""What a train engine says of an adapter that it sends (``method="lora"``), and what a receiver asks of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from core_rl.config.engine import LoraConfig
from core_rl.errors import WeightsError, raise_all

if TYPE_CHECKING:
    from core_rl.engine.state import EngineState

__all__ = ["SentAdapter"]


@dataclass(frozen=True, kw_only=True)
class SentAdapter:
    """What the factors of an adapter do not tell by themselves."""

    rank: int
    alpha: int
    rslora: bool
    base: str | None = None
    """What tells the weights below it from others (`digest_of_directory`); None where nobody asked for digests."""

    @staticmethod
    def of(engine: EngineState, verify: bool) -> SentAdapter:
        """That of ``engine``; collective."""
        lora = engine.config.model.lora
        assert lora is not None  # required when the upload began
        base = engine._base_digest() if verify else None
        return SentAdapter(rank=lora.rank, alpha=lora.alpha, rslora=lora.rslora, base=base)

    def require_fit(self, lora: LoraConfig, base: Callable[[], str]) -> None:
        """Raise one `WeightsError` unless it is as ``lora`` has it, over the weights that ``base()`` tells."""
        raise_all(WeightsError, "the adapter does not fit this engine", self._problems(lora, base))

    def _problems(self, lora: LoraConfig, base: Callable[[], str]) -> Iterator[str]:
        for name in ("rank", "alpha", "rslora"):
            there, here = getattr(self, name), getattr(lora, name)
            if there != here:
                yield f"model.lora.{name} is {there!r} where it comes from, and {here!r} here; set both to the same"
        if self.base is not None and self.base != (own := base()):
            yield (
                f"it is of another base model (digest {self.base[:8]} there and {own[:8]} here); set model.path to "
                "the base that it is trained on"
            )
