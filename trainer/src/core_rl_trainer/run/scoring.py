"""Log-probs, values and scores of a batch of completions, from the models of a run; and the updates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from core_rl.data.batch import SequenceBatch
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.errors import RolloutError
from core_rl.launch.group import EngineGroup
from core_rl_trainer.algorithms.fields import (
    ADVANTAGES,
    BEHAVIOUR,
    BOOTSTRAP,
    PROXIMAL,
    REFERENCE,
    REWARDS,
    SCORES,
    VALUES,
)
from core_rl_trainer.algorithms.interface import ModelInterface
from core_rl_trainer.algorithms.preferences import RewardModelConfig, RewardModelInterface
from core_rl_trainer.rewards.config import REWARD_MODEL
from core_rl_trainer.rewards.terms import TERM
from core_rl_trainer.run.engines import Roles


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """The forward passes between a rollout and the updates."""

    roles: Roles
    actor: ModelInterface[Any]
    critic: ModelInterface[Any] | None
    reward_weight: float
    mb_spec: MicroBatchSpec

    def complete(self, batch: SequenceBatch) -> tuple[SequenceBatch, Tensor]:
        """``batch`` with all that the algorithm wants, and the actor's log-probs ``[T]``: the mismatch needs them."""
        fields = self.actor.wanted_fields
        (scored,) = self.add_scores(batch)
        with self.roles.working(self.roles.actor) as engine:
            recomputed = self.actor.inference(engine, batch, self.mb_spec)[BEHAVIOUR]
        if PROXIMAL in fields:
            scored = scored.with_tokens(**{PROXIMAL: recomputed})
        if REFERENCE in fields:
            with self.roles.as_reference() as engine:
                reference = self.actor.inference(engine, batch, self.mb_spec)[BEHAVIOUR]
            scored = scored.with_tokens(**{REFERENCE: reference})
        if self.critic is not None and self.roles.critic is not None:
            with self.roles.working(self.roles.critic) as engine:
                valued = self.critic.inference(engine, batch, self.mb_spec)
            scored = scored.with_tokens(**{VALUES: valued[VALUES]})
            scored = scored.with_sequences(**{BOOTSTRAP: valued[BOOTSTRAP]})
        return scored, recomputed

    def evaluated(self, *batches: SequenceBatch) -> tuple[SequenceBatch, ...]:
        """``batches`` of an evaluation, with the rewards that training uses."""
        if self.roles.reward is None:
            return batches
        with self.roles.training():
            return self.add_scores(*batches)

    def add_scores(self, *batches: SequenceBatch) -> tuple[SequenceBatch, ...]:
        """``batches`` with the scores of the reward model added to the rewards, and as the term ``reward_model``.

        Raises `RolloutError` for a score that is not finite.
        """
        if self.roles.reward is None:
            return batches
        with self.roles.working(self.roles.reward) as engine:
            return tuple(self._scored(engine, batch) for batch in batches)

    def _scored(self, engine: EngineGroup, batch: SequenceBatch) -> SequenceBatch:
        model = RewardModelInterface(RewardModelConfig())
        scores = model.inference(engine, batch, self.mb_spec)[SCORES]
        wrong = (~torch.isfinite(scores)).nonzero().flatten().tolist()
        if wrong:
            raise RolloutError(
                f"the reward model's score of sequence {wrong[0]} is {float(scores[wrong[0]])}"
            )
        rewards = batch[REWARDS] + self.reward_weight * scores
        return batch.with_sequences(**{REWARDS: rewards, f"{TERM}{REWARD_MODEL}": scores})

    def train(self, batch: SequenceBatch) -> dict[str, float]:
        """The updates on a completed batch, the critic's first; its metrics begin with ``critic_``."""
        prepared = self.actor.prepare(batch)
        metrics = _largest_advantage(prepared)
        if self.critic is not None and self.roles.critic is not None:
            with self.roles.working(self.roles.critic) as engine:
                critic_metrics = self.critic.train_step(engine, prepared, self.mb_spec)
                engine.lr_scheduler_step()
            metrics |= {f"critic_{name}": value for name, value in critic_metrics.items()}
        with self.roles.working(self.roles.actor) as engine:
            metrics |= self.actor.train_step(engine, prepared, self.mb_spec)
            engine.lr_scheduler_step()
        return metrics


def _largest_advantage(batch: SequenceBatch) -> dict[str, float]:
    """The largest magnitude among the trained tokens: 0 where nothing is learned. None for rules without advantages."""
    if ADVANTAGES not in batch:
        return {}
    return {"advantage_max": max(batch[ADVANTAGES][batch.loss_mask].abs().tolist(), default=0.0)}
