"""The PPO actor with group-relative advantages: GRPO (DeepSeekMath, arXiv:2402.03300)."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from core_rl.algorithms.advantages import group_advantages, spread_to_tokens
from core_rl.algorithms.aggregation import Aggregation
from core_rl.algorithms.interface import ModelInterface, TrainEngineLike
from core_rl.algorithms.kl import KLEstimator
from core_rl.algorithms.policy_loss import (
    ADVANTAGES,
    BEHAVIOUR,
    PROXIMAL,
    REFERENCE,
    PolicyLoss,
    mismatch_metrics,
)
from core_rl.config.base import Config
from core_rl.data.batch import LOSS_MASK, SequenceBatch
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.data.shard import shard
from core_rl.engines.metrics import results
from core_rl.errors import BatchError

__all__ = ["PPOActorConfig", "PPOActorInterface"]

REWARDS = "rewards"
GROUP = "group"


class PPOActorConfig(Config):
    """Settings of the PPO actor."""

    normalize_by_std: bool = True
    """Divide a group's centred rewards by their standard deviation; false as in Dr. GRPO (arXiv:2503.20783)."""
    clip_low: float = Field(default=0.2, ge=0.0, lt=1.0)
    """Ratios below ``1 - clip_low`` gain nothing."""
    clip_high: float = Field(default=0.2, ge=0.0)
    """Ratios above ``1 + clip_high`` gain nothing; larger than ``clip_low`` in DAPO (arXiv:2503.14476)."""
    kl_coef: float = Field(default=0.0, ge=0.0)
    """Weight of the KL divergence to the reference policy in the loss; above 0 a reference is needed."""
    kl_estimator: KLEstimator = "k3"
    """k2 has the gradient of KL(policy || reference), k3 (GRPO) the reverse one's, k1 none in expectation."""
    entropy_coef: float = Field(default=0.0, ge=0.0)
    """Weight of the entropy bonus."""
    aggregation: Aggregation = "token_mean"
    """``token_mean``, or ``sequence_mean``: each sequence counts the same, however long."""
    minibatches: int = Field(default=1, ge=1)
    """Optimizer steps in one pass over the batch."""
    epochs: int = Field(default=1, ge=1)
    """Passes over the batch."""
    recompute_logprobs: bool = True
    """Take ratios to log-probs that the train engine computes before its first update, instead of those
    that the rollout engine reported."""
    temperature: float = Field(default=1.0, gt=0.0)
    """That of the rollouts: log-probs are computed at it."""


class PPOActorInterface(ModelInterface[PPOActorConfig]):
    """Batches come from a rollout: ``loss_mask`` and ``logprobs [T]``, ``rewards`` and ``group [B]``."""

    config_class = PPOActorConfig

    @property
    def wanted_fields(self) -> frozenset[str]:
        """``prox_logprobs`` and ``ref_logprobs`` where the settings use them."""
        wanted = {PROXIMAL: self.config.recompute_logprobs, REFERENCE: self.config.kl_coef > 0}
        return frozenset(name for name, used in wanted.items() if used)

    def loss(self) -> PolicyLoss:
        """The loss with these settings."""
        chosen = self.config
        return PolicyLoss(
            clip_low=chosen.clip_low,
            clip_high=chosen.clip_high,
            kl_coef=chosen.kl_coef,
            kl_estimator=chosen.kl_estimator,
            entropy_coef=chosen.entropy_coef,
            aggregation=chosen.aggregation,
        )

    def prepare(self, batch: SequenceBatch) -> SequenceBatch:
        """``batch`` with ``advantages [T]`` from its rewards and groups, over all of its sequences.

        Raises `BatchError` that lists the missing fields.
        """
        needed = {REWARDS, GROUP, LOSS_MASK, BEHAVIOUR, *self.wanted_fields}
        missing = sorted(name for name in needed if name not in batch)
        if missing:
            raise BatchError(f"the PPO actor needs the fields {missing}; the batch has {_fields(batch)}")
        advantages = group_advantages(batch[REWARDS], batch[GROUP], by_std=self.config.normalize_by_std)
        return batch.with_tokens(**{ADVANTAGES: spread_to_tokens(advantages, batch)})

    def train_step(
        self, engine: TrainEngineLike, batch: SequenceBatch, mb_spec: MicroBatchSpec
    ) -> dict[str, float]:
        """``epochs * minibatches`` updates. Metrics are means over the updates, extremes their extremes.

        ``mismatch_*`` compares the rollout's log-probs with the train engine's before the first
        update: over the whole batch where they were recomputed, else over the first minibatch.
        """
        batch = self.prepare(batch)
        loss = self.loss().spec(self.config.temperature)
        parts = [part for part in shard(batch, self.config.minibatches) if part.num_sequences]
        updates = [
            engine.train_batch(part, loss, mb_spec) for _ in range(self.config.epochs) for part in parts
        ]
        merged = _merge(updates) | {name: v for name, v in updates[0].items() if name.startswith("mismatch_")}
        if PROXIMAL in batch:
            merged |= results(mismatch_metrics(batch[PROXIMAL], batch[BEHAVIOUR], batch.loss_mask))
        return merged | {"updates": float(len(updates))}

    def inference(
        self, engine: TrainEngineLike, batch: SequenceBatch, mb_spec: MicroBatchSpec
    ) -> SequenceBatch:
        """``batch`` with ``logprobs [T]`` replaced by those of the engine's weights, at the temperature.

        The caller stores them as ``prox_logprobs`` or ``ref_logprobs``, according to whose weights they are.
        """
        output = engine.forward(batch, mb_spec, ("logprobs",), self.config.temperature)
        return batch.with_tokens(**{BEHAVIOUR: output["logprobs"]})


def _merge(updates: Sequence[dict[str, float]]) -> dict[str, float]:
    """One number for each metric of several updates; a skipped update may lack some."""
    merged = {}
    for name in dict.fromkeys(name for update in updates for name in update):
        values = [update[name] for update in updates if name in update]
        pick = max if name.endswith("_max") else min if name.endswith("_min") else None
        merged[name] = pick(values) if pick else sum(values) / len(values)
    return merged


def _fields(batch: SequenceBatch) -> list[str]:
    return sorted([*batch.tokens, *batch.sequences])
