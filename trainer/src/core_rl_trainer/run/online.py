"""Training on rollouts: take completions, score them, update, sync the new weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core_rl.backend.meta import BETWEEN_MACHINES, FinetuneSpec, WeightUpdateMeta
from core_rl.checkpoint.run import RunCheckpoint
from core_rl.config.capability import Capability
from core_rl.data.batch import SequenceBatch
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.engine.inference import InferenceEngine
from core_rl.engine.sync import sync_weights
from core_rl.errors import RolloutError, WeightsError
from core_rl.launch.group import EngineGroup
from core_rl.launch.hosts import Hosts
from core_rl_trainer.algorithms.fields import (
    ADVANTAGES,
    BASELINE_REWARDS,
    BEHAVIOUR,
    BOOTSTRAP,
    PROXIMAL,
    REFERENCE,
    REWARDS,
    SCORES,
    VALUES,
)
from core_rl_trainer.algorithms.interface import ModelInterface, make_interface
from core_rl_trainer.algorithms.preferences import RewardModelConfig, RewardModelInterface
from core_rl_trainer.data.batches import NumberedBatches
from core_rl_trainer.logs.samples import Evaluation
from core_rl_trainer.plan.run_plan import RunPlan
from core_rl_trainer.recipe.rollout import RolloutSection
from core_rl_trainer.rewards.config import REWARD_MODEL
from core_rl_trainer.rewards.terms import TERM, reward_metrics
from core_rl_trainer.run.doctor import JudgedEngine, RunDoctor
from core_rl_trainer.run.engines import Roles, micro_batches_of, open_roles
from core_rl_trainer.run.loop import Learner
from core_rl_trainer.run.rollouts import Rollouts, rare_collections
from core_rl_trainer.run.run_directory import RunDirectory
from core_rl_trainer.workflows.user_code import open_user_code

LOGPROBS, VERSIONS = "logprobs", "versions"
NAMES = [f"mismatch_{name}" for name in ("k1", "k3", "chi2", "max", "share", "ppl_ratio")]
NOTABLE_NATS = 0.01
COMPARED, EVERY = 64, 8
"""Where the algorithm needs no log-probs of the train engine, one of 8 sequences is compared, at least 64."""


def mismatch_of(trainer: Tensor, batch: SequenceBatch, counted: Tensor | None = None) -> dict[str, float]:
    """k1, k3 and chi-squared of KL(rollout ‖ trainer), the largest difference, the share of tokens above 0.01
    nats, and the ratio of perplexities.

    ``trainer [T]`` are the train engine's log-probs; the rollout's are the batch's ``logprobs``.
    ``counted`` (bool ``[T]``) narrows the trained tokens further. Values at other tokens may be
    anything. Without a counted token all numbers are NaN.
    """
    mask = batch.loss_mask if counted is None else batch.loss_mask & counted
    if not bool(mask.any()):
        return dict.fromkeys(NAMES, math.nan)
    d = trainer[mask].detach().double() - batch[LOGPROBS][mask].double()
    values = (
        -d.mean(),
        (torch.expm1(d) - d).mean(),
        torch.expm1(2 * d).mean(),
        d.abs().max(),
        (d.abs() > NOTABLE_NATS).double().mean(),
        _reduce(-d, _owners(mask, batch), "mean").exp().mean(),
    )
    return dict(zip(NAMES, map(float, values), strict=True))


def _owners(mask: Tensor, batch: SequenceBatch) -> Tensor:
    """For each token of ``mask [T]``, the number of its sequence among sequences with such tokens; int64 ``[N]``."""
    lengths = torch.tensor(batch.lengths, device=mask.device)
    owner: Tensor = torch.repeat_interleave(lengths)[mask].unique_consecutive(return_inverse=True)[1]
    return owner


def _reduce(values: Tensor, owner: Tensor, how: str) -> Tensor:
    """``values [N]`` reduced over each sequence."""
    zeros = values.new_zeros(int(owner.max()) + 1)
    return zeros.scatter_reduce(0, owner, values, how, include_self=False)


def mismatch_by_lag(trainer: Tensor, batch: SequenceBatch, version: int) -> dict[str, float]:
    """`mismatch_of` for the tokens of each lag by itself, as ``mismatch_k1_lag0`` and so on.

    The lag of a token is ``version``, that of the weights to be trained, minus its own in ``versions``.
    """
    lags = version - batch[VERSIONS]
    present = lags[batch.loss_mask].unique().tolist()
    return {
        f"{name}_lag{lag}": value
        for lag in present
        for name, value in mismatch_of(trainer, batch, lags == lag).items()
    }


def staleness_of(batch: SequenceBatch, version: int) -> dict[str, float]:
    """The lag of a batch's trained tokens when the weights of ``version`` are trained on them.

    ``staleness_mean`` and ``staleness_max`` are lags in versions, over tokens; ``mixed_versions`` is the
    share of sequences whose tokens come from more than one version: generation continued across a weight sync.
    """
    mask = batch.loss_mask
    if not bool(mask.any()):
        return dict.fromkeys(("staleness_mean", "staleness_max", "mixed_versions"), math.nan)
    lags = (version - batch[VERSIONS])[mask].double()
    owner = _owners(mask, batch)
    mixed = _reduce(lags, owner, "amax") != _reduce(lags, owner, "amin")
    return {
        "staleness_mean": float(lags.mean()),
        "staleness_max": float(lags.max()),
        "mixed_versions": float(mixed.double().mean()),
    }


@dataclass(frozen=True, kw_only=True)
class OnlineLearner(Learner):
    """Training on rollouts.

    A synchronous run that resumes from a checkpoint is the run that was never interrupted. In an asynchronous one the
    data order is the same; the weight version of a completion depends on the clock, within the bound.
    """

    phases = ("rollout", "logprobs", "sync")

    roles: Roles
    rollouts: Rollouts
    critic: ModelInterface[Any] | None
    reward_weight: float
    """Factor of the reward model's scores."""
    mb_spec: MicroBatchSpec
    settings: RolloutSection
    weights: Path
    """The directory through which weights go to the rollout engine, or the rendezvous file."""
    sync_limit_s: float
    """The time limit of one weight sync, in seconds."""
    eval_samples: Sequence[Mapping[str, Any]]
    doctor: RunDoctor | None

    @property
    def start_phase(self) -> str:
        return "first weights to the rollout engine"

    def start(self) -> None:
        """Send the initial weights to the rollout engine."""
        self.sync(0)

    def batch(self, step: int) -> SequenceBatch:
        """Completions of the next prompts."""
        return self.rollouts.training_batch(step, self.batches)

    def training(self) -> AbstractContextManager[None]:
        return self.roles.training()

    def score(self, batch: SequenceBatch, step: int) -> tuple[SequenceBatch, dict[str, float]]:
        complete, compared, recomputed = self._complete(batch)
        metrics = _describe(complete) | self.rollouts.counters() | staleness_of(batch, step - 1)
        if self.doctor is not None:
            metrics |= self.doctor.judge(step, compared, recomputed, self.save_model)
        metrics |= mismatch_of(recomputed, compared) | mismatch_by_lag(recomputed, compared, step - 1)
        return complete, metrics

    def update(self, batch: SequenceBatch, step: int) -> dict[str, float]:
        """The updates of the critic, whose metrics begin with ``critic_``, and of the actor; their metrics."""
        prepared = self.interface.prepare(batch)
        metrics: dict[str, float] = {}
        if ADVANTAGES in prepared:  # 0 where nothing is learned
            advantages = prepared[ADVANTAGES][prepared.loss_mask]
            metrics["advantage_max"] = max(advantages.abs().tolist(), default=0.0)
        if self.critic is not None and self.roles.critic is not None:
            with self.roles.working(self.roles.critic) as engine:
                critic_metrics = self.critic.train_step(engine, prepared, self.mb_spec)
                engine.lr_scheduler_step()
            metrics |= {f"critic_{name}": value for name, value in critic_metrics.items()}
        with self.roles.working(self.roles.actor) as engine:
            metrics |= self.interface.train_step(engine, prepared, self.mb_spec)
            engine.lr_scheduler_step()
        return metrics

    def _complete(self, batch: SequenceBatch) -> tuple[SequenceBatch, SequenceBatch, Tensor]:
        """``batch`` with all that the algorithm wants; and for the mismatch the sequences that are compared, all of
        ``batch`` or some, with the actor's log-probs ``[T]`` of them.
        """
        fields = self.interface.wanted_fields
        (scored,) = self._add_scores(batch)
        compared = batch if PROXIMAL in fields else compared_part(batch)
        with self.roles.working(self.roles.actor) as engine:
            recomputed = self.interface.inference(engine, compared, self.mb_spec)[BEHAVIOUR]
        if PROXIMAL in fields:
            scored = scored.with_tokens(**{PROXIMAL: recomputed})
        if REFERENCE in fields:
            with self.roles.as_reference() as engine:
                reference = self.interface.inference(engine, batch, self.mb_spec)[BEHAVIOUR]
            scored = scored.with_tokens(**{REFERENCE: reference})
        if self.critic is not None and self.roles.critic is not None:
            with self.roles.working(self.roles.critic) as engine:
                valued = self.critic.inference(engine, batch, self.mb_spec)
            scored = scored.with_tokens(**{VALUES: valued[VALUES]})
            scored = scored.with_sequences(**{BOOTSTRAP: valued[BOOTSTRAP]})
        return scored, compared, recomputed

    def _add_scores(self, *batches: SequenceBatch) -> tuple[SequenceBatch, ...]:
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

    def sync(self, version: int) -> None:
        """Sync the actor's weights to the rollout engine as ``version``, while episodes run.

        Generation is interrupted where the engine can do so, and continues with the new weights.
        """
        super().sync(version)
        method, rollout, limit_s = self.settings.sync, self.roles.rollout, self.sync_limit_s
        meta = WeightUpdateMeta(
            method=method,
            version=version,
            path=str(self.weights),
            host=self.roles.driver_address if method in BETWEEN_MACHINES else None,
            delta=self.settings.sync_delta,
        )
        try:
            sync_weights(self, rollout, meta, limit_s, interrupted(rollout))
        except TimeoutError as error:
            raise WeightsError(
                f"the rollout engine did not take the weights of version {version} within {limit_s:g} s; "
                "if the sync is only slow, raise timeouts.sync_s"
            ) from error
        except WeightsError as error:
            raise WeightsError(f"rollout.sync = {method!r}: {error}") from error

    def upload_weights(self, meta: WeightUpdateMeta) -> None:
        """Send the actor's weights; it is on its devices only meanwhile."""
        with self.model() as actor:
            actor.upload_weights(meta)

    def evaluate(self) -> Evaluation:
        """Mean rewards on the evaluation prompts with the rollout engine's weights, and some completions."""
        if not self.eval_samples:
            return Evaluation(metrics={})
        return self.rollouts.evaluate(self.eval_samples, self._evaluated)

    def _evaluated(self, *batches: SequenceBatch) -> tuple[SequenceBatch, ...]:
        """``batches`` of an evaluation, with the rewards that training uses."""
        if self.roles.reward is None:
            return batches
        with self.roles.training():
            return self._add_scores(*batches)

    def model(self) -> AbstractContextManager[EngineGroup]:
        return self.roles.working(self.roles.actor)

    def trained(self) -> dict[str, EngineGroup]:
        return self.roles.trained()

    def state_dict(self) -> dict[str, Any]:
        """With prompts that were drawn and not trained on."""
        state = {"rollouts": self.rollouts.state_dict(), "algorithm": self.interface.state_dict()}
        return super().state_dict() | state

    def restore(self, checkpoint: RunCheckpoint) -> None:
        """Resume from ``checkpoint``, whose weights are synced and whose prompts are submitted again."""
        super().restore(checkpoint)
        self.interface.load_state_dict(checkpoint.state["algorithm"])
        self.sync(checkpoint.step)
        self.rollouts.load_state_dict(checkpoint.state["rollouts"], self.batches)


@contextmanager
def open_online(
    plan: RunPlan, directory: RunDirectory, finetune: FinetuneSpec, hosts: Hosts
) -> Iterator[OnlineLearner]:
    """Open the engines and the user's code of ``plan``; both are closed on the way out."""
    assert plan.rollout is not None and plan.code is not None  # of a plan with rollouts
    recipe, algorithm = plan.recipe, make_interface(plan.algorithm)
    settings, critic, reward_model = recipe.rollout, recipe.critic, recipe.reward_model
    with (
        open_roles(
            plan.trainers,
            plan.rollout,
            finetune,
            recipe.timeouts.call_s,
            hosts,
            servers_on_machines=plan.serves_on_machines,
        ) as roles,
        open_user_code(
            plan.code,
            plan.tokenizer,
            reward_processes=settings.reward_processes,
            reward_timeout_s=settings.reward_timeout_s,
            skip_special_tokens=settings.skip_special_tokens,
        ) as user,
        rare_collections(),
    ):
        rollouts = Rollouts(
            engine=roles.rollout,
            user=user,
            tokenizer=plan.tokenizer,
            settings=settings,
            seed=recipe.seed,
            eval_samples=recipe.eval_samples,
            with_baseline=BASELINE_REWARDS in algorithm.wanted_fields,
        )
        # Without a filter, the last steps need not run ahead of the remaining prompts.
        limit = plan.schedule.steps * plan.batch_size if settings.should_accept is None else None
        batches = NumberedBatches(plan.data.train, plan.batch_size, recipe.seed, limit)
        held_out = plan.data.held_out
        groups = (roles.actor, roles.critic, roles.reference, roles.reward)
        yield OnlineLearner(
            interface=algorithm,
            batches=batches,
            tokenizer_path=recipe.model.path,
            roles=roles,
            rollouts=rollouts,
            critic=None if critic is None else make_interface(critic.interface),
            reward_weight=0.0 if reward_model is None else reward_model.weight,
            mb_spec=micro_batches_of(groups, recipe.micro_batch_tokens, recipe.share_prefixes),
            settings=settings,
            weights=directory.weights if settings.sync == "disk" else directory.rendezvous,
            sync_limit_s=recipe.timeouts.sync_s,
            eval_samples=() if held_out is None else [held_out[index] for index in range(len(held_out))],
            doctor=_doctor_of(plan, directory),
        )


def _doctor_of(plan: RunPlan, directory: RunDirectory) -> RunDoctor | None:
    section, actor = plan.recipe.doctor, plan.trainers["actor"]
    if section is None:
        return None
    assert plan.rollout is not None  # of a plan with rollouts
    return RunDoctor(
        every=section.every,
        sequences=section.sequences,
        temperature=plan.recipe.rollout.temperature,
        trainer=JudgedEngine("train", actor.spec.name, actor.config.dtype),
        rollout=JudgedEngine("rollout", plan.rollout.spec.name, plan.rollout.config.dtype),
        model=directory.judged,
        timeout_s=plan.recipe.timeouts.call_s,
    )


@contextmanager
def interrupted(engine: InferenceEngine) -> Iterator[None]:
    """Pause an engine that can interrupt generation, and resume it with the new weights."""
    if not engine.spec.supports(Capability.PAUSE):
        yield
        return
    engine.pause()
    try:
        yield
    finally:
        engine.resume()


def compared_part(batch: SequenceBatch) -> SequenceBatch:
    """Sequences of ``batch`` in equal steps: see `COMPARED`."""
    step = min(EVERY, max(1, batch.num_sequences // COMPARED))
    return batch if step == 1 else batch.select(range(0, batch.num_sequences, step))


def _describe(batch: SequenceBatch) -> dict[str, float]:
    """Metrics of the rollouts of a step."""
    rewards, groups = batch["rewards"].double(), batch["group"].unique(return_inverse=True)[1]
    equal = _reduce(rewards, groups, "amax") == _reduce(rewards, groups, "amin")
    reasons = batch.meta["stop_reason"]
    turns = {"turns": float(batch["turns"].double().mean())} if "turns" in batch else {}
    return {
        **turns,
        **reward_metrics(batch),
        "reward": float(rewards.mean()),
        "reward_std": float(rewards.std(correction=0)),
        "reward_min": float(rewards.min()),
        "reward_max": float(rewards.max()),
        "groups_without_signal": float(equal.double().mean()),
        "completion_tokens": float(batch.loss_mask.sum()) / batch.num_sequences,
        "truncated": reasons.count("length") / len(reasons),
    }
