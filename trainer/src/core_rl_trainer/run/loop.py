"""One training step on rollouts: take completions, score them, update, sync the new weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core_rl.backend.meta import WeightUpdateMeta
from core_rl.checkpoint.run import RunCheckpoint
from core_rl.config.capability import Capability
from core_rl.data.batch import SequenceBatch
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.engine.inference import InferenceEngine
from core_rl.engine.sync import sync_weights
from core_rl.errors import WeightsError
from core_rl_trainer.algorithms.interface import ModelInterface
from core_rl_trainer.data.batches import NumberedBatches, prompt_loader
from core_rl_trainer.data.training_data import TrainingData
from core_rl_trainer.logs.mismatch import mismatch_by_lag, mismatch_of, staleness_of
from core_rl_trainer.logs.samples import Evaluation
from core_rl_trainer.recipe.recipe import Recipe
from core_rl_trainer.rewards.terms import reward_metrics
from core_rl_trainer.run.parts import part_writers, restore_parts
from core_rl_trainer.run.roles import Roles
from core_rl_trainer.run.rollouts import Rollouts
from core_rl_trainer.run.scoring import Scoring

__all__ = ["Clock", "TrainingLoop", "interrupted"]


class TrainingLoop:
    """The engines, the algorithm and the data of a run. The version of the weights is the number of steps.

    Everything random is a function of the recipe's seed and of positions in the data order. A synchronous run that
    resumes from a checkpoint is therefore the run that was never interrupted. In an asynchronous one the data order
    is the same; the weight version of a completion depends on the clock, within the bound.
    """

    start_phase = "first weights to the rollout engine"

    def __init__(
        self,
        recipe: Recipe,
        algorithm: ModelInterface[Any],
        critic: ModelInterface[Any] | None,
        roles: Roles,
        rollouts: Rollouts,
        data: TrainingData,
        weights: Path,
    ) -> None:
        self._algorithm = algorithm
        self._roles = roles
        self._rollouts = rollouts
        held_out = data.held_out
        self._eval_samples = (
            [held_out[index] for index in range(len(held_out))] if held_out is not None else []
        )
        self._sync = recipe.rollout.sync
        self._weights = weights if recipe.rollout.sync == "disk" else weights.with_suffix(".rendezvous")
        self._model_path = recipe.model.path
        self._address = roles.driver_address
        self._scoring = Scoring(
            roles=roles,
            actor=algorithm,
            critic=critic,
            reward_weight=recipe.reward_model.weight if recipe.reward_model is not None else 0.0,
            mb_spec=MicroBatchSpec(max_tokens=recipe.micro_batch_tokens),
        )
        self._sync_limit_s = recipe.timeouts.sync_s
        prompts = recipe.rollout.prompts_per_step
        loader = prompt_loader(data.train, prompts, recipe.seed)
        # Without a filter, the last steps need not run ahead of what is left to train on.
        limit = recipe.steps * prompts if recipe.rollout.should_accept is None else None
        self._data = NumberedBatches(loader, limit)

    def step(self, step: int) -> dict[str, float]:
        """Train on the next prompts; the metrics of the step. Afterwards all weights have version ``step``."""
        clock = Clock()
        with clock.phase("rollout"):
            batch = self._rollouts.training_batch(step, self._data)
        with self._roles.training():
            with clock.phase("logprobs"):
                complete, recomputed = self._scoring.complete(batch)
            metrics = _describe(complete) | self._rollouts.counters() | staleness_of(batch, step - 1)
            with clock.phase("update"):
                metrics |= self._scoring.train(complete)
        with clock.phase("sync"):
            self.publish(step)
        metrics |= mismatch_of(recomputed, batch) | mismatch_by_lag(recomputed, batch, step - 1)
        speed = {"tokens_per_s": batch.num_tokens / clock.total()}
        return metrics | speed | clock.seconds | {"version": float(step)}

    def publish(self, version: int) -> None:
        """Sync the actor's weights to the rollout engine as ``version``, while episodes run.

        Generation is interrupted where the engine can do so, and continues with the new weights.
        """
        meta = WeightUpdateMeta(
            method=self._sync, version=version, path=str(self._weights), host=self._address
        )
        for group in self._roles.trained().values():
            group.set_version(version)
        rollout = self._roles.rollout
        try:
            sync_weights(_Sender(self._roles), rollout, meta, self._sync_limit_s, interrupted(rollout))
        except TimeoutError as error:
            raise WeightsError(
                f"the rollout engine did not take the weights of version {version} within {self._sync_limit_s:g} s; "
                "if the sync is only slow, raise timeouts.sync_s"
            ) from error
        except WeightsError as error:
            raise WeightsError(f"rollout.sync = {self._sync!r}: {error}") from error

    def start(self) -> None:
        """Prepare the first step: the rollout engine gets the initial weights."""
        self.publish(0)

    def save_model(self, path: Path) -> None:
        """The actor in Hugging Face format, with its tokenizer."""
        with self._roles.working(self._roles.actor) as actor:
            self._algorithm.save(actor, str(path), tokenizer_path=self._model_path)

    def save_adapter(self, path: Path) -> None:
        """The actor's adapter, with the tokenizer."""
        with self._roles.working(self._roles.actor) as actor:
            self._algorithm.save_adapter(actor, str(path), tokenizer_path=self._model_path)

    def evaluate(self) -> Evaluation:
        """Mean rewards on the evaluation prompts with the rollout engine's weights, and some completions."""
        if not self._eval_samples:
            return Evaluation(metrics={})
        return self._rollouts.evaluate(self._eval_samples, self._scoring.evaluated)

    # ----------------------------------------------------------------- state

    def parts(self, *, portable: bool, background: bool) -> dict[str, Callable[[Path], None]]:
        """Writers, by name, of the parts of a run checkpoint that are not in `state_dict`."""
        return part_writers(self._roles.trained(), portable=portable, background=background)

    def wait_for_parts(self) -> None:
        """Return when no part is being written in the background, or raise its error."""
        for group in self._roles.trained().values():
            group.wait_for_saves()

    def state_dict(self) -> dict[str, Any]:
        """The position in the data order, and what was drawn and not trained on, as JSON."""
        return {
            "data": self._data.state_dict(),
            "rollouts": self._rollouts.state_dict(),
            "algorithm": self._algorithm.state_dict(),
        }

    def restore(self, checkpoint: RunCheckpoint) -> None:
        """Resume from ``checkpoint``, whose weights are published and whose prompts are submitted again.

        Raises `CheckpointMismatch` when its parts do not belong together.
        """
        restore_parts(self._roles.trained(), checkpoint)
        self._algorithm.load_state_dict(checkpoint.state["algorithm"])
        self.publish(checkpoint.step)
        self._data.load_state_dict(checkpoint.state["data"])
        self._rollouts.load_state_dict(checkpoint.state["rollouts"])


@dataclass(frozen=True)
class _Sender:
    """The actor, on its devices only while it sends."""

    roles: Roles

    def upload_weights(self, meta: WeightUpdateMeta) -> None:
        with self.roles.working(self.roles.actor) as actor:
            actor.upload_weights(meta)


@contextmanager
def interrupted(engine: InferenceEngine) -> Iterator[None]:
    """Pause an engine that can interrupt what it generates; others take new weights on their own terms."""
    if not engine.spec.supports(Capability.PAUSE):
        yield
        return
    engine.pause()
    try:
        yield
    finally:
        engine.resume()


class Clock:
    """Wall-clock seconds of the phases of a step."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[f"time_{name}_s"] = time.perf_counter() - start

    def total(self) -> float:
        return time.perf_counter() - self._start


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
