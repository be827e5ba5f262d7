"""Training on rollouts: take completions, score them, update, sync the new weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core_rl.backend.meta import FinetuneSpec, SyncMethod, WeightUpdateMeta
from core_rl.checkpoint.run import RunCheckpoint
from core_rl.config.capability import Capability
from core_rl.data.batch import SequenceBatch
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.engine.inference import InferenceEngine
from core_rl.engine.sync import sync_weights
from core_rl.errors import WeightsError
from core_rl.launch.group import EngineGroup
from core_rl.launch.hosts import Hosts
from core_rl_trainer.algorithms.fields import BASELINE_REWARDS
from core_rl_trainer.algorithms.interface import ModelInterface, make_interface
from core_rl_trainer.data.batches import NumberedBatches
from core_rl_trainer.data.training_data import TrainingData
from core_rl_trainer.logs.mismatch import mismatch_by_lag, mismatch_of, staleness_of
from core_rl_trainer.logs.samples import Evaluation
from core_rl_trainer.plan.run_plan import RunPlan
from core_rl_trainer.rewards.terms import reward_metrics
from core_rl_trainer.run.engines import Roles, open_roles
from core_rl_trainer.run.loop import Phases
from core_rl_trainer.run.parts import restore_parts
from core_rl_trainer.run.rollouts import Rollouts
from core_rl_trainer.run.run_directory import RunDirectory
from core_rl_trainer.run.scoring import Scoring
from core_rl_trainer.workflows.user_code import open_user_code

__all__ = ["OnlineLearner", "WeightSync", "interrupted", "open_online"]


class OnlineLearner:
    """Engines, algorithm and data of training on rollouts. The version of the weights is the number of steps.

    Everything random is a function of the seed and of positions in the data order. A synchronous run that resumes from
    a checkpoint is therefore the run that was never interrupted. In an asynchronous one the data order is the same; the
    weight version of a completion depends on the clock, within the bound.
    """

    phases = Phases(
        start="first weights to the rollout engine", batch="rollout", score="logprobs", sync="sync"
    )

    def __init__(
        self,
        algorithm: ModelInterface[Any],
        roles: Roles,
        rollouts: Rollouts,
        scoring: Scoring,
        data: TrainingData,
        batches: NumberedBatches,
        sync: WeightSync,
        tokenizer_path: str,
    ) -> None:
        self._algorithm = algorithm
        self._roles = roles
        self._rollouts = rollouts
        self._scoring = scoring
        held_out = data.held_out
        self._eval_samples = (
            [held_out[index] for index in range(len(held_out))] if held_out is not None else []
        )
        self._data = batches
        self._sync = sync
        self._tokenizer_path = tokenizer_path

    def start(self) -> None:
        """Send the initial weights to the rollout engine."""
        self.sync(0)

    def batch(self, step: int) -> SequenceBatch:
        """Completions of the next prompts."""
        return self._rollouts.training_batch(step, self._data)

    def training(self) -> AbstractContextManager[None]:
        """Inside the context the train roles have the devices."""
        return self._roles.training()

    def score(self, batch: SequenceBatch, step: int) -> tuple[SequenceBatch, dict[str, float]]:
        """``batch`` with the fields that the algorithm wants, and metrics of the rollouts."""
        complete, recomputed = self._scoring.complete(batch)
        metrics = _describe(complete) | self._rollouts.counters() | staleness_of(batch, step - 1)
        return complete, metrics | mismatch_of(recomputed, batch) | mismatch_by_lag(
            recomputed, batch, step - 1
        )

    def update(self, batch: SequenceBatch, step: int) -> dict[str, float]:
        """The updates of the critic and the actor; their metrics."""
        return self._scoring.train(batch)

    def sync(self, version: int) -> None:
        """Sync the actor's weights to the rollout engine as ``version``, while episodes run.

        Generation is interrupted where the engine can do so, and continues with the new weights.
        """
        sync, rollout = self._sync, self._roles.rollout
        meta = WeightUpdateMeta(
            method=sync.method, version=version, path=str(sync.path), host=self._roles.driver_address
        )
        for group in self._roles.trained().values():
            group.set_version(version)
        try:
            sync_weights(_Sender(self._roles), rollout, meta, sync.limit_s, interrupted(rollout))
        except TimeoutError as error:
            raise WeightsError(
                f"the rollout engine did not take the weights of version {version} within {sync.limit_s:g} s; "
                "if the sync is only slow, raise timeouts.sync_s"
            ) from error
        except WeightsError as error:
            raise WeightsError(f"rollout.sync = {sync.method!r}: {error}") from error

    def evaluate(self) -> Evaluation:
        """Mean rewards on the evaluation prompts with the rollout engine's weights, and some completions."""
        if not self._eval_samples:
            return Evaluation(metrics={})
        return self._rollouts.evaluate(self._eval_samples, self._scoring.evaluated)

    def save_model(self, path: Path) -> None:
        """Write the actor in Hugging Face format, with its tokenizer."""
        with self._roles.working(self._roles.actor) as actor:
            self._algorithm.save(actor, str(path), tokenizer_path=self._tokenizer_path)

    def save_adapter(self, path: Path) -> None:
        """Write the actor's adapter, with the tokenizer."""
        with self._roles.working(self._roles.actor) as actor:
            self._algorithm.save_adapter(actor, str(path), tokenizer_path=self._tokenizer_path)

    # ----------------------------------------------------------------- state

    def trained(self) -> dict[str, EngineGroup]:
        """The groups whose state a checkpoint holds, by role."""
        return self._roles.trained()

    def state_dict(self) -> dict[str, Any]:
        """The position in the data order, and prompts that were drawn and not trained on, as JSON."""
        return {
            "data": self._data.state_dict(),
            "rollouts": self._rollouts.state_dict(),
            "algorithm": self._algorithm.state_dict(),
        }

    def restore(self, checkpoint: RunCheckpoint) -> None:
        """Resume from ``checkpoint``, whose weights are synced and whose prompts are submitted again.

        Raises `CheckpointMismatch` when its parts do not belong together.
        """
        restore_parts(self._roles.trained(), checkpoint)
        self._algorithm.load_state_dict(checkpoint.state["algorithm"])
        self.sync(checkpoint.step)
        self._data.load_state_dict(checkpoint.state["data"])
        self._rollouts.load_state_dict(checkpoint.state["rollouts"])


@dataclass(frozen=True, kw_only=True)
class WeightSync:
    """The way of new weights to the rollout engine."""

    method: SyncMethod
    path: Path
    """The directory of the weights, or the rendezvous file."""
    limit_s: float
    """The time limit of one sync, in seconds."""


@contextmanager
def open_online(
    plan: RunPlan, directory: RunDirectory, finetune: FinetuneSpec, hosts: Hosts
) -> Iterator[OnlineLearner]:
    """Open the engines and the user's code of ``plan``; both are closed on the way out."""
    assert plan.rollout is not None and plan.code is not None  # of a plan with rollouts
    settings, algorithm = plan.rollouts, make_interface(plan.algorithm)
    with (
        open_roles(
            plan.trainers,
            plan.rollout,
            finetune,
            plan.limits.call_s,
            hosts,
            servers_on_machines=plan.servers_on_machines,
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
            roles.rollout,
            user,
            plan.tokenizer,
            settings,
            seed=plan.seed,
            eval_samples=plan.eval_samples,
            with_baseline=BASELINE_REWARDS in algorithm.wanted_fields,
        )
        scoring = Scoring(
            roles=roles,
            actor=algorithm,
            critic=None if plan.critic is None else make_interface(plan.critic),
            reward_weight=plan.reward_weight,
            mb_spec=MicroBatchSpec(max_tokens=plan.micro_batch_tokens),
        )
        # Without a filter, the last steps need not run ahead of the remaining prompts.
        limit = plan.schedule.steps * plan.batch_size if settings.should_accept is None else None
        batches = NumberedBatches(plan.data.train, plan.batch_size, plan.seed, limit)
        path = directory.weights if settings.sync == "disk" else directory.rendezvous
        sync = WeightSync(method=settings.sync, path=path, limit_s=plan.limits.sync_s)
        model = plan.models["model.path"]
        yield OnlineLearner(algorithm, roles, rollouts, scoring, plan.data, batches, sync, model)


@dataclass(frozen=True)
class _Sender:
    """The actor, on its devices only while it sends."""

    roles: Roles

    def upload_weights(self, meta: WeightUpdateMeta) -> None:
        with self.roles.working(self.roles.actor) as actor:
            actor.upload_weights(meta)


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
