"""The actor of PPO and its descendants: advantages, objective, corrections."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator

from core_rl.config.base import Config
from core_rl.data.batch import LOSS_MASK, SequenceBatch
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.data.outputs import masked_fill
from core_rl.distributed.comm import Comm
from core_rl_trainer.algorithms.advantages import (
    GRPO,
    AdvantageConfig,
    groups_with_signal,
    overlong_penalty,
    token_rewards,
    truncated_sequences,
    whiten,
)
from core_rl_trainer.algorithms.fields import (
    ADVANTAGES,
    BEHAVIOUR,
    GROUP,
    IMPORTANCE,
    PROXIMAL,
    REFERENCE,
    RETURNS,
    REWARDS,
    TOKEN_REWARDS,
    VALUES,
    require_fields,
)
from core_rl_trainer.algorithms.interface import ModelInterface, TrainEngineLike
from core_rl_trainer.algorithms.kl import KLEstimator, kl_estimate
from core_rl_trainer.algorithms.objectives import Clipped, ObjectiveConfig, PolicyLoss
from core_rl_trainer.algorithms.off_policy import CorrectionConfig, importance_metrics
from core_rl_trainer.algorithms.updates import UpdatesConfig, merge_updates, peers, run_updates

logger = logging.getLogger(__name__)

MAX_ERROR = 0.2
"""The relative error of the divergence is clipped to this on both sides (arXiv:1909.08593, section 2.2)."""


class OverlongConfig(Config):
    """DAPO's soft overlong punishment (arXiv:2503.14476, equation 13)."""

    max_length: int = Field(ge=1)
    """Trained tokens at which the reward is 1 less."""
    buffer: int = Field(ge=1)
    """The penalty begins this many tokens before ``max_length``."""

    @model_validator(mode="after")
    def _inside(self) -> Self:
        if self.buffer > self.max_length:
            raise ValueError(f"buffer = {self.buffer} is longer than max_length = {self.max_length}")
        return self


class PPOActorConfig(UpdatesConfig):
    """Settings of the actor. The defaults are GRPO's, with each token counted the same."""

    other_names = (
        {"beta": "kl_coef", "kl_loss_coef": "kl_coef", "loss_type": "loss", "epsilon_high": "loss.clip_high"}
        | dict.fromkeys(("epsilon", "clip_ratio"), "loss.clip_low and loss.clip_high")
        | dict.fromkeys(("num_iterations", "ppo_epochs"), "epochs")
    )

    advantage: AdvantageConfig = GRPO()
    """Rule from rewards to advantages: a name, or its settings with the name as ``type``."""
    loss: ObjectiveConfig = Clipped()
    """The policy objective: a name, or its settings with the name as ``type``."""
    correction: CorrectionConfig | None = None
    """Weights for tokens of another policy than the train engine's: a name, or its settings."""
    kl_coef: float = Field(default=0.0, ge=0.0)
    """Weight of the KL divergence to the reference policy; above 0 a reference is needed."""
    kl_estimator: KLEstimator = "k3"
    """In the loss, k2 has the gradient of KL(policy || reference), k3 (GRPO) the reverse one's, k1 none in
    expectation; in the reward, k1 is unbiased."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Target of the KL divergence: the loss (GRPO), or the reward of each token (PPO, RLOO)."""
    kl_target: float | None = Field(default=None, gt=0.0)
    """Adapt ``kl_coef`` until the divergence for each token is this (arXiv:1909.08593, section 2.2)."""
    kl_horizon: float = Field(default=10_000.0, gt=0.0)
    """Sequences over which the adaptation takes place."""
    entropy_coef: float = Field(default=0.0, ge=0.0)
    """Weight of the entropy bonus."""
    log_entropy: bool = False
    """Compute the metric ``entropy`` also without a bonus: a second pass over all logits. ``entropy_estimate``, the
    mean of -log p over the trained tokens, costs nothing."""
    whiten_advantages: bool = False
    """Bring advantages to mean 0 and variance 1 over the tokens of the global batch."""
    drop_equal_groups: bool = False
    """Leave out groups whose rewards are all equal (DAPO's dynamic sampling, arXiv:2503.14476, section 3.2)."""
    mask_truncated_completions: bool = False
    """Leave completions that were cut off out of the loss (DAPO's overlong filtering, arXiv:2503.14476, section 3.4).
    Their rewards count in the baseline of their group."""
    overlong: OverlongConfig | None = None
    """Subtract a penalty from the reward of completions that are nearly too long."""
    max_kl: float | None = Field(default=None, gt=0.0)
    """End a step's updates when the divergence from the policy before them (``approx_kl``) is above this."""
    recompute_logprobs: bool = True
    """Take ratios to log-probs that the train engine computes before its first update, instead of those
    that the rollout engine reported."""
    temperature: float = Field(default=1.0, gt=0.0)
    """That of the rollouts: log-probs are computed at it."""

    @model_validator(mode="before")
    @classmethod
    def _same_kind(cls, values: Any) -> Any:
        """A section without ``type`` changes single fields of the default."""
        if not isinstance(values, Mapping):
            return values
        changed = {}
        for name in ("advantage", "loss"):
            section = values.get(name)
            if isinstance(section, Mapping) and "type" not in section:
                changed[name] = cls.model_fields[name].default.model_dump() | dict(section)
        return {**values, **changed}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.correction is not None and not self.recompute_logprobs:
            raise ValueError("correction weighs recomputed log-probs; it needs recompute_logprobs = true")
        if self.kl_target is not None and self.kl_coef == 0:
            raise ValueError("kl_target adapts kl_coef, which never leaves 0; set kl_coef above 0")
        if self.mask_truncated_completions and getattr(self.advantage, "bootstrap_truncated", False):
            raise ValueError(
                "mask_truncated_completions leaves truncated completions out of the loss, so that "
                "advantage.bootstrap_truncated has no effect; set either to false"
            )
        return self


class PPOActorInterface(ModelInterface[PPOActorConfig]):
    """Batches come from a rollout: ``loss_mask`` and ``logprobs [T]``, ``rewards`` and ``group [B]``."""

    config_class = PPOActorConfig

    def __init__(self, config: PPOActorConfig) -> None:
        super().__init__(config)
        self._kl_coef = config.kl_coef

    @property
    def wanted_fields(self) -> frozenset[str]:
        """Fields of other engines, or of greedy completions, that the settings use."""
        used_fields = {PROXIMAL: self.config.recompute_logprobs, REFERENCE: self.config.kl_coef > 0}
        from_rollout = {GROUP, TOKEN_REWARDS}
        return frozenset(name for name, used in used_fields.items() if used) | (
            self.config.advantage.fields - from_rollout
        )

    @property
    def compares_completions(self) -> bool:
        """True for advantages against the group, and where groups without differences are left out."""
        return GROUP in self.config.advantage.fields or self.config.drop_equal_groups

    def loss(self) -> PolicyLoss:
        """The loss with these settings and the present KL coefficient."""
        config = self.config
        return PolicyLoss(
            objective=config.loss,
            kl_coef=self._kl_coef if config.kl_in == "loss" else 0.0,
            kl_estimator=config.kl_estimator,
            entropy_coef=config.entropy_coef,
            log_entropy=config.log_entropy,
        )

    # ------------------------------------------------------------- preparation

    def prepare(self, batch: SequenceBatch, comm: Comm | None = None) -> SequenceBatch:
        """``batch`` with ``token_rewards``, ``advantages`` and, where there are values, ``returns [T]``.

        Everything is taken over all sequences of ``batch``, and of the ranks of ``comm``, each of which holds
        whole groups. ``drop_equal_groups`` leaves groups without signal out, and ``mask_truncated_completions``
        truncated sequences, after the advantages; the result may be empty.
        Raises `BatchError` that lists the missing fields, or names a reward that is not finite.
        """
        comm, config = comm or Comm(), self.config
        grouped = {GROUP} if config.drop_equal_groups else set()
        needed = {REWARDS, LOSS_MASK, BEHAVIOUR, *grouped, *self.wanted_fields, *config.advantage.fields}
        require_fields("the PPO actor", batch, needed)
        rewards = batch[REWARDS].float()
        if config.overlong is not None:
            rewards = rewards + overlong_penalty(batch, config.overlong.max_length, config.overlong.buffer)
        penalty = None  # of the KL to the reference, for each token
        if config.kl_in == "reward" and config.kl_coef:
            penalty = self._kl_coef * self._divergence(batch, config.kl_estimator)
        earned = token_rewards(rewards, batch, penalty)
        batch = batch.with_tokens(**{TOKEN_REWARDS: earned})
        if config.drop_equal_groups:
            mask = groups_with_signal(batch[REWARDS], batch[GROUP])
            batch = batch.select(mask.nonzero().flatten().tolist())
        advantages = config.advantage(batch, comm).float()
        batch = batch.with_tokens(**{ADVANTAGES: advantages})
        if VALUES in batch:
            returns = masked_fill(batch[VALUES], batch.loss_mask) + advantages
            batch = batch.with_tokens(**{RETURNS: returns})
        if config.mask_truncated_completions:
            truncated = truncated_sequences(batch, "mask_truncated_completions")
            batch = batch.select((~truncated).nonzero().flatten().tolist())
        # Over the sequences that are trained.
        config, fields = self.config, dict[str, torch.Tensor]()
        if config.whiten_advantages:
            fields[ADVANTAGES] = whiten(batch[ADVANTAGES], batch.loss_mask, comm)
        if config.correction is not None:
            fields[IMPORTANCE] = config.correction.limited(config.correction.ratios(batch))
        return batch.with_tokens(**fields)

    def _divergence(self, batch: SequenceBatch, estimator: KLEstimator) -> torch.Tensor:
        """Estimates of KL(policy || reference) before the updates, ``[T]``."""
        logprobs, mask = batch[PROXIMAL] if PROXIMAL in batch else batch[BEHAVIOUR], batch.loss_mask
        return kl_estimate(masked_fill(logprobs, mask), masked_fill(batch[REFERENCE], mask), estimator)

    # ------------------------------------------------------------------- steps

    def train_step(
        self, engine: TrainEngineLike, batch: SequenceBatch, mb_spec: MicroBatchSpec
    ) -> dict[str, float]:
        """``epochs * minibatches`` updates, or fewer; a batch that has ``advantages`` is taken as prepared.

        Metrics are means over the updates, extremes their extremes. A batch without any sequence is logged and
        changes nothing. The mismatch between the log-probs of rollout and train engine is not among them: that is
        `core_rl_trainer.run.online`, which a loop calls with the log-probs of `inference`.
        """
        comm, config = peers(engine), self.config
        if ADVANTAGES not in batch:
            batch = self.prepare(batch, comm)
        require_fields("the PPO actor", batch, {LOSS_MASK, BEHAVIOUR, *self._used_in_loss()})
        if not comm.sum([float(batch.num_sequences)])[0]:
            logger.warning(
                "nothing to train in this step: all groups have equal rewards (drop_equal_groups), or all completions "
                "are truncated (mask_truncated_completions)"
            )
            return {"updates": 0.0, "update_successful": 0.0}
        loss = self.loss().spec(config.temperature)
        updates = run_updates(engine, batch, loss, mb_spec, config, config.max_kl)
        correction = config.correction
        weights = {} if correction is None else importance_metrics(correction, batch, comm)
        return merge_updates(updates) | weights | self._control(batch, comm)

    def _used_in_loss(self) -> Iterator[str]:
        if self.config.recompute_logprobs:
            yield PROXIMAL
        if self.config.kl_coef and self.config.kl_in == "loss":
            yield REFERENCE
        if self.config.correction is not None:
            yield IMPORTANCE

    def _control(self, batch: SequenceBatch, comm: Comm) -> dict[str, float]:
        """Adapt the KL coefficient to the divergence of the batch; the coefficient that the step had.

        Proportional control of its log (arXiv:1909.08593, section 2.2). Without a target it stays.
        """
        if REFERENCE not in batch or not self.config.kl_coef:
            return {}
        divergence = self._divergence(batch, "k1")[batch.loss_mask].double()
        local_sums = [float(divergence.sum()), float(len(divergence)), float(batch.num_sequences)]
        total, tokens, sequences = comm.sum(local_sums)
        kl, used, config = total / max(tokens, 1.0), self._kl_coef, self.config
        if config.kl_target is not None:
            error = min(max(kl / config.kl_target - 1, -MAX_ERROR), MAX_ERROR)
            self._kl_coef *= 1 + error * sequences / config.kl_horizon
        return {"kl_coef": used, "kl_before": kl}

    def inference(
        self, engine: TrainEngineLike, batch: SequenceBatch, mb_spec: MicroBatchSpec
    ) -> SequenceBatch:
        """``batch`` with ``logprobs [T]`` under the engine's weights, at the temperature.

        The caller stores them as ``prox_logprobs`` or ``ref_logprobs``, according to whose weights they are.
        """
        output = engine.forward(batch, mb_spec, ("logprobs",), self.config.temperature)
        return batch.with_tokens(**{BEHAVIOUR: output["logprobs"]})

    def state_dict(self) -> dict[str, Any]:
        return {"coef": self._kl_coef}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._kl_coef = float(state["coef"])
