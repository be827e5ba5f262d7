"""Training on rollouts: take completions, score them, update, sync the new weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core_rl.backend.meta import BETWEEN_MACHINES, FinetuneSpec, SyncMethod, WeightUpdateMeta
from core_rl.checkpoint.run import RunCheckpoint
from core_rl.config.capability import Capability
from core_rl.data.batch import SequenceBatch
from core_rl.engine.inference import InferenceEngine
from core_rl.engine.sync import sync_weights
from core_rl.errors import WeightsError
from core_rl.launch.group import EngineGroup
from core_rl.launch.hosts import Hosts
from core_rl_trainer.algorithms.fields import BASELINE_REWARDS
from core_rl_trainer.algorithms.interface import make_interface
from core_rl_trainer.data.batches import NumberedBatches
from core_rl_trainer.logs.mismatch import mismatch_by_lag, mismatch_of, staleness_of
from core_rl_trainer.logs.samples import Evaluation
from core_rl_trainer.plan.run_plan import RunPlan
from core_rl_trainer.rewards.terms import reward_metrics
from core_rl_trainer.run.engines import Roles, open_roles
from core_rl_trainer.run.loop import Learner, Phases
from core_rl_trainer.run.rollouts import Rollouts
from core_rl_trainer.run.run_directory import RunDirectory
from core_rl_trainer.run.scoring import Scoring
from core_rl_trainer.workflows.user_code import open_user_code


@dataclass(frozen=True, kw_only=True)
class WeightSync:
    """The way of new weights to the rollout engine."""

    method: SyncMethod
    path: Path
    """The directory of the weights, or the rendezvous file."""
    delta: bool
    """Whether only changes are sent."""
    limit_s: float
    """The time limit of one sync, in seconds."""


@dataclass(frozen=True, kw_only=True)
class OnlineLearner(Learner):
    """Training on rollouts.

    A synchronous run that resumes from a checkpoint is the run that was never interrupted. In an asynchronous one the
    data order is the same; the weight version of a completion depends on the clock, within the bound.
    """

    roles: Roles
    rollouts: Rollouts
    scoring: Scoring
    weights: WeightSync
    eval_samples: Sequence[Mapping[str, Any]]

    def start(self) -> None:
        """Send the initial weights to the rollout engine."""
        self.sync(0)

    def batch(self, step: int) -> SequenceBatch:
        """Completions of the next prompts."""
        return self.rollouts.training_batch(step, self.batches)

    def training(self) -> AbstractContextManager[None]:
        return self.roles.training()

    def score(self, batch: SequenceBatch, step: int) -> tuple[SequenceBatch, dict[str, float]]:
        complete, recomputed = self.scoring.complete(batch)
        metrics = _describe(complete) | self.rollouts.counters() | staleness_of(batch, step - 1)
        return complete, metrics | mismatch_of(recomputed, batch) | mismatch_by_lag(
            recomputed, batch, step - 1
        )

    def update(self, batch: SequenceBatch, step: int) -> dict[str, float]:
        """The updates of the critic and the actor; their metrics."""
        return self.scoring.train(batch)

    def sync(self, version: int) -> None:
        """Sync the actor's weights to the rollout engine as ``version``, while episodes run.

        Generation is interrupted where the engine can do so, and continues with the new weights.
        """
        super().sync(version)
        weights, rollout = self.weights, self.roles.rollout
        meta = WeightUpdateMeta(
            method=weights.method,
            version=version,
            path=str(weights.path),
            host=self.roles.driver_address if weights.method in BETWEEN_MACHINES else None,
            delta=weights.delta,
        )
        try:
            sync_weights(self, rollout, meta, weights.limit_s, interrupted(rollout))
        except TimeoutError as error:
            raise WeightsError(
                f"the rollout engine did not take the weights of version {version} within {weights.limit_s:g} s; "
                "if the sync is only slow, raise timeouts.sync_s"
            ) from error
        except WeightsError as error:
            raise WeightsError(f"rollout.sync = {weights.method!r}: {error}") from error

    def upload_weights(self, meta: WeightUpdateMeta) -> None:
        """Send the actor's weights; it is on its devices only meanwhile."""
        with self.model() as actor:
            actor.upload_weights(meta)

    def evaluate(self) -> Evaluation:
        """Mean rewards on the evaluation prompts with the rollout engine's weights, and some completions."""
        if not self.eval_samples:
            return Evaluation(metrics={})
        return self.rollouts.evaluate(self.eval_samples, self.scoring.evaluated)

    def model(self) -> AbstractContextManager[EngineGroup]:
        return self.roles.working(self.roles.actor)

    def trained(self) -> dict[str, EngineGroup]:
        return self.roles.trained()

    def state_dict(self) -> dict[str, Any]:
        """With prompts that were drawn and not trained on."""
        return super().state_dict() | {
            "rollouts": self.rollouts.state_dict(),
            "algorithm": self.interface.state_dict(),
        }

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
        scoring = Scoring(
            roles=roles,
            actor=algorithm,
            critic=None if critic is None else make_interface(critic.interface),
            reward_weight=0.0 if reward_model is None else reward_model.weight,
            mb_spec=roles.micro_batches(recipe.micro_batch_tokens, recipe.share_prefixes),
        )
        # Without a filter, the last steps need not run ahead of the remaining prompts.
        limit = plan.schedule.steps * plan.batch_size if settings.should_accept is None else None
        batches = NumberedBatches(plan.data.train, plan.batch_size, recipe.seed, limit)
        path = directory.weights if settings.sync == "disk" else directory.rendezvous
        held_out = plan.data.held_out
        yield OnlineLearner(
            interface=algorithm,
            batches=batches,
            tokenizer_path=recipe.model.path,
            phases=Phases(
                start="first weights to the rollout engine", batch="rollout", score="logprobs", sync="sync"
            ),
            roles=roles,
            rollouts=rollouts,
            scoring=scoring,
            weights=WeightSync(
                method=settings.sync, path=path, delta=settings.sync_delta, limit_s=recipe.timeouts.sync_s
            ),
            eval_samples=() if held_out is None else [held_out[index] for index in range(len(held_out))],
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


def _describe(batch: SequenceBatch) -> dict[str, float]:
    """Metrics of the rollouts of a step."""
    rewards, groups = batch["rewards"].double(), batch["group"]
    means = [rewards[groups == group] for group in groups.unique()]
    reasons = batch.meta["stop_reason"]
    turns = {"turns": float(batch["turns"].double().mean())} if "turns" in batch else {}
    return (
        turns
        | reward_metrics(batch)
        | {
            "reward": float(rewards.mean()),
            "reward_std": float(rewards.std(correction=0)),
            "reward_min": float(rewards.min()),
            "reward_max": float(rewards.max()),
            "groups_without_signal": sum(bool((part == part[0]).all()) for part in means) / len(means),
            "completion_tokens": float(batch.loss_mask.sum()) / batch.num_sequences,
            "truncated": reasons.count("length") / len(reasons),
        }
    )
