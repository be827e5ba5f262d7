"""The ``loss`` section of an actor's config: which policy objective, with which clip range and aggregation."""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import BeforeValidator, Discriminator, Field, Tag
from torch import Tensor

from core_rl.config.base import Config
from core_rl.data.batch import SequenceBatch
from core_rl.errors import LossError
from core_rl_trainer.algorithms import surrogates
from core_rl_trainer.algorithms.aggregation import Aggregation
from core_rl_trainer.algorithms.named import Custom, named_kind, named_or_fields
from core_rl_trainer.algorithms.surrogates import Surrogate

__all__ = [
    "CISPO",
    "GSPO",
    "Clipped",
    "CustomObjective",
    "DualClipped",
    "Objective",
    "ObjectiveConfig",
    "Reinforce",
    "SequenceClipped",
]


class Objective(Config):
    """The quantity that is maximised at each token."""

    aggregation: Aggregation = "token_mean"
    """``token_mean``; ``sequence_mean``: each sequence counts the same, however long; or ``{fixed_length: N}``."""

    @abstractmethod
    def __call__(self, logprobs: Tensor, old: Tensor, advantages: Tensor, batch: SequenceBatch) -> Surrogate:
        """The objective at each token; arguments are ``[T]``, and 0 where ``loss_mask`` is false."""


class _ClipRange(Objective):
    clip_low: float = Field(default=0.2, ge=0.0, le=1.0)
    """Ratios below ``1 - clip_low`` gain nothing."""
    clip_high: float = Field(default=0.2, ge=0.0)
    """Ratios above ``1 + clip_high`` gain nothing."""


class Clipped(_ClipRange):
    """PPO's clipped objective (arXiv:1707.06347); with a larger ``clip_high`` DAPO's (arXiv:2503.14476)."""

    type: Literal["clipped"] = "clipped"
    """The name."""

    def __call__(self, logprobs: Tensor, old: Tensor, advantages: Tensor, batch: SequenceBatch) -> Surrogate:
        return surrogates.clipped_surrogate(logprobs, old, advantages, self.clip_low, self.clip_high)


class DualClipped(_ClipRange):
    """Clipped, and bounded where the advantage is negative (arXiv:1912.09729)."""

    type: Literal["dual_clipped"] = "dual_clipped"
    """The name."""
    limit: float = Field(default=3.0, gt=1.0)
    """Ratios above it count as this much where the advantage is negative."""

    def __call__(self, logprobs: Tensor, old: Tensor, advantages: Tensor, batch: SequenceBatch) -> Surrogate:
        return surrogates.dual_clipped_surrogate(
            logprobs, old, advantages, self.clip_low, self.clip_high, self.limit
        )


class GSPO(_ClipRange):
    """Clipped with the geometric mean of a sequence's ratios (arXiv:2507.18071)."""

    type: Literal["gspo"] = "gspo"
    """The name."""
    clip_low: float = Field(default=3e-4, ge=0.0, le=1.0)
    clip_high: float = Field(default=4e-4, ge=0.0)
    aggregation: Aggregation = "sequence_mean"

    def __call__(self, logprobs: Tensor, old: Tensor, advantages: Tensor, batch: SequenceBatch) -> Surrogate:
        return surrogates.gspo_surrogate(logprobs, old, advantages, batch, self.clip_low, self.clip_high)


class SequenceClipped(_ClipRange):
    """Clipped with the product of a sequence's ratios: the whole completion is one action (arXiv:2402.14740)."""

    type: Literal["sequence_clipped"] = "sequence_clipped"
    """The name."""
    aggregation: Aggregation = "sequence_mean"

    def __call__(self, logprobs: Tensor, old: Tensor, advantages: Tensor, batch: SequenceBatch) -> Surrogate:
        return surrogates.sequence_clipped_surrogate(
            logprobs, old, advantages, batch, self.clip_low, self.clip_high
        )


class CISPO(Objective):
    """The clipped ratio as a weight without gradient (arXiv:2506.13585)."""

    type: Literal["cispo"] = "cispo"
    """The name."""
    clip_low: float = Field(default=1.0, ge=0.0, le=1.0)
    """Weights are at least ``1 - clip_low``; the paper has no lower bound."""
    clip_high: float = Field(default=4.0, ge=0.0)
    """Weights are at most ``1 + clip_high``; 5 as in ScaleRL (arXiv:2510.13786)."""

    def __call__(self, logprobs: Tensor, old: Tensor, advantages: Tensor, batch: SequenceBatch) -> Surrogate:
        return surrogates.cispo_surrogate(logprobs, old, advantages, self.clip_low, self.clip_high)


class Reinforce(Objective):
    """Advantage times log-prob, without a ratio (Williams 1992)."""

    type: Literal["reinforce"] = "reinforce"
    """The name."""

    def __call__(self, logprobs: Tensor, old: Tensor, advantages: Tensor, batch: SequenceBatch) -> Surrogate:
        return surrogates.reinforce_surrogate(logprobs, advantages)


BUILT_IN = ("clipped", "dual_clipped", "gspo", "sequence_clipped", "cispo", "reinforce")


class CustomObjective(Custom, Objective):
    """An objective of your own: ``fn(logprobs, old, advantages, batch)`` gives a `Surrogate`, or its values ``[T]``."""

    kind: ClassVar[str] = "policy loss"
    built_in: ClassVar[tuple[str, ...]] = BUILT_IN

    def __call__(self, logprobs: Tensor, old: Tensor, advantages: Tensor, batch: SequenceBatch) -> Surrogate:
        found = self.function()(logprobs, old, advantages, batch)
        if isinstance(found, torch.Tensor):
            found = Surrogate(values=found, clipped=torch.zeros_like(found, dtype=torch.bool))
        if not isinstance(found, Surrogate) or found.values.shape != logprobs.shape:
            raise LossError(f"{self.type!r} must return a Surrogate or a tensor {list(logprobs.shape)}")
        return found


ObjectiveConfig = Annotated[
    Annotated[Clipped, Tag("clipped")]
    | Annotated[DualClipped, Tag("dual_clipped")]
    | Annotated[GSPO, Tag("gspo")]
    | Annotated[SequenceClipped, Tag("sequence_clipped")]
    | Annotated[CISPO, Tag("cispo")]
    | Annotated[Reinforce, Tag("reinforce")]
    | Annotated[CustomObjective, Tag("custom")],
    Discriminator(named_kind(BUILT_IN)),
    BeforeValidator(named_or_fields),
]
"""A name, or its settings with the name as ``type``."""
