"""The ``advantage`` section of an actor's config: which rule turns rewards into advantages."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag
from torch import Tensor

from core_rl.config.base import Config
from core_rl.data.batch import SequenceBatch
from core_rl.data.outputs import segment_sum
from core_rl.distributed.comm import Comm
from core_rl.errors import BatchError
from core_rl_trainer.algorithms import advantages as rules
from core_rl_trainer.algorithms.fields import BASELINE_REWARDS, BOOTSTRAP, GROUP, TOKEN_REWARDS, VALUES
from core_rl_trainer.algorithms.gae import gae_advantages, returns_to_go
from core_rl_trainer.algorithms.named import Custom, named_kind, named_or_fields
from core_rl_trainer.algorithms.shaping import truncated_sequences

__all__ = [
    "GAE",
    "GRPO",
    "RLOO",
    "AdvantageConfig",
    "AdvantageEstimator",
    "CustomAdvantage",
    "DrGRPO",
    "ReMax",
    "ReinforcePlusPlus",
    "ReinforcePlusPlusBaseline",
]


class AdvantageEstimator(Config):
    """Turns ``token_rewards [T]`` into advantages ``[T]``."""

    fields: ClassVar[frozenset[str]] = frozenset()
    """Fields that the batch must have besides ``token_rewards``."""

    @abstractmethod
    def __call__(self, batch: SequenceBatch, comm: Comm) -> Tensor:
        """Advantages ``[T]``, over ``batch`` and those of the other ranks of ``comm``."""


class _OfSequences(AdvantageEstimator):
    """One advantage for each sequence, by ``rule``: from what all its tokens earn, and from its one field."""

    rule: ClassVar[Callable[[Tensor, Tensor], Tensor]]
    fields: ClassVar[frozenset[str]] = frozenset({GROUP})

    def __call__(self, batch: SequenceBatch, comm: Comm) -> Tensor:
        rewards = segment_sum(batch[TOKEN_REWARDS].double(), batch.cu_seqlens)
        (field,) = self.fields
        return rules.spread_to_tokens(type(self).rule(rewards, batch[field]), batch)


class GRPO(_OfSequences):
    """Against the group's mean, by its standard deviation (arXiv:2402.03300)."""

    type: Literal["grpo"] = "grpo"
    """The name."""
    rule: ClassVar = rules.grpo_advantages


class DrGRPO(_OfSequences):
    """Against the group's mean (arXiv:2503.20783)."""

    type: Literal["dr_grpo"] = "dr_grpo"
    """The name."""
    rule: ClassVar = rules.dr_grpo_advantages


class RLOO(_OfSequences):
    """Against the mean of the others in the group (arXiv:2402.14740)."""

    type: Literal["rloo"] = "rloo"
    """The name."""
    rule: ClassVar = rules.rloo_advantages


class ReMax(_OfSequences):
    """Against the greedy completion of the same prompt (arXiv:2310.10505)."""

    type: Literal["remax"] = "remax"
    """The name."""
    rule: ClassVar = rules.remax_advantages
    fields: ClassVar[frozenset[str]] = frozenset({BASELINE_REWARDS})


class ReinforcePlusPlus(AdvantageEstimator):
    """REINFORCE++ (arXiv:2501.03262): what a token and those after it earn, whitened over the global batch."""

    type: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    """The name."""
    gamma: float = Field(default=1.0, ge=0.0, le=1.0)
    """Discount for each token."""

    def __call__(self, batch: SequenceBatch, comm: Comm) -> Tensor:
        returns = returns_to_go(batch[TOKEN_REWARDS], batch, self.gamma)
        return rules.whiten(returns, batch.loss_mask, comm)


class ReinforcePlusPlusBaseline(_OfSequences):
    """REINFORCE++ with the group's mean as a baseline (arXiv:2501.03262), whitened over the global batch."""

    type: Literal["reinforce_plus_plus_baseline"] = "reinforce_plus_plus_baseline"
    """The name."""
    rule: ClassVar = rules.dr_grpo_advantages

    def __call__(self, batch: SequenceBatch, comm: Comm) -> Tensor:
        return rules.whiten(super().__call__(batch, comm), batch.loss_mask, comm)


class GAE(AdvantageEstimator):
    """Generalised advantage estimation with a critic's values (arXiv:1506.02438); PPO."""

    type: Literal["gae"] = "gae"
    """The name."""
    gamma: float = Field(default=1.0, ge=0.0, le=1.0)
    """Discount for each token."""
    lam: float = Field(default=0.95, ge=0.0, le=1.0)
    """1 trusts the rewards alone, 0 the critic alone."""
    bootstrap_truncated: bool = False
    """Where a completion was truncated, bootstrap from the critic's value of the next state, instead of 0."""
    fields: ClassVar[frozenset[str]] = frozenset({VALUES, BOOTSTRAP})

    def __call__(self, batch: SequenceBatch, comm: Comm) -> Tensor:
        last = None
        if self.bootstrap_truncated:
            bootstrap = batch[BOOTSTRAP]
            last = bootstrap * truncated_sequences(batch, "bootstrap_truncated").to(bootstrap)
        return gae_advantages(
            batch[TOKEN_REWARDS], batch[VALUES], batch, gamma=self.gamma, lam=self.lam, last_values=last
        )


BUILT_IN = ("grpo", "dr_grpo", "rloo", "remax", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae")


class CustomAdvantage(Custom, AdvantageEstimator):
    """A rule of your own: ``fn(batch) -> Tensor [T]``; the batch has ``token_rewards [T]``."""

    kind: ClassVar[str] = "advantage rule"
    built_in: ClassVar[tuple[str, ...]] = BUILT_IN

    def __call__(self, batch: SequenceBatch, comm: Comm) -> Tensor:
        found: Tensor = self.function()(batch)
        if found.shape != (batch.num_tokens,):
            raise BatchError(
                f"{self.type!r} returned advantages {list(found.shape)}; return one for each token, "
                f"[{batch.num_tokens}]"
            )
        return found


AdvantageConfig = Annotated[
    Annotated[GRPO, Tag("grpo")]
    | Annotated[DrGRPO, Tag("dr_grpo")]
    | Annotated[RLOO, Tag("rloo")]
    | Annotated[ReMax, Tag("remax")]
    | Annotated[ReinforcePlusPlus, Tag("reinforce_plus_plus")]
    | Annotated[ReinforcePlusPlusBaseline, Tag("reinforce_plus_plus_baseline")]
    | Annotated[GAE, Tag("gae")]
    | Annotated[CustomAdvantage, Tag("custom")],
    Discriminator(named_kind(BUILT_IN)),
    BeforeValidator(named_or_fields),
]
"""A name, or its settings with the name as ``type``."""
