"""Rollouts of a synchronous run: what is drawn depends on the seed, the step and the place in it alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from core_rl.data.batch import SequenceBatch
from core_rl.engines.inference import InferenceEngine
from core_rl.errors import RolloutError
from core_rl.rollout.rewards import RewardFn
from core_rl.rollout.types import SamplingParams
from core_rl.rollout.workflow import RolloutWorkflow, SingleTurnWorkflow, TokenGenerator, derive_seed
from core_rl.training.recipe import Recipe

__all__ = ["NumberedWorkflow", "Rollouts"]

NUMBER = "number"
TRAINING, EVALUATION = 0, 1
"""Streams of seeds."""


@dataclass(frozen=True, kw_only=True)
class NumberedWorkflow:
    """Runs ``inner`` under the number that the sample carries, instead of the count of episodes so far.

    So an evaluation changes nothing in the training after it, and neither does a resume.
    """

    inner: RolloutWorkflow

    async def arun_episode(
        self, engine: TokenGenerator, data: Mapping[str, Any], episode: int
    ) -> SequenceBatch | None:
        """The sequences of one sample."""
        return await self.inner.arun_episode(engine, data, int(data[NUMBER]))


class Rollouts:
    """Answers to prompts, for training and for evaluation, as a recipe says."""

    def __init__(self, recipe: Recipe, engine: InferenceEngine, reward: RewardFn) -> None:
        self._recipe = recipe
        self._engine = engine
        chosen = recipe.rollout
        self._sampling = SamplingParams(
            max_new_tokens=chosen.max_new_tokens,
            temperature=chosen.temperature,
            top_p=chosen.top_p,
            top_k=chosen.top_k,
        )
        self._reward = reward

    def training_batch(self, step: int, samples: Sequence[Mapping[str, Any]]) -> SequenceBatch:
        """A group of answers to each of the prompts of ``step``, as `SingleTurnWorkflow` packs them.

        Raises `RolloutError` when an answer comes from weights of another version than the newest.
        """
        seeded = replace(self._sampling, seed=derive_seed(self._recipe.seed, TRAINING))
        batch = self._run(
            samples, (step - 1) * len(samples), seeded, group_size=self._recipe.rollout.group_size
        )
        version = self._engine.get_version()
        drawn = batch["versions"][batch.loss_mask]
        if bool((drawn != version).any()):
            raise RolloutError(
                f"step {step}: tokens of version {int(drawn.min())} in a synchronous run at version {version}; "
                "the rollout engine did not take the newest weights"
            )
        return batch

    def mean_rewards(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Means over held-out ``samples``: of sampled answers, the same seeds each time, and of greedy ones."""
        seeded = replace(self._sampling, seed=derive_seed(self._recipe.seed, EVALUATION))
        greedy = replace(self._sampling, temperature=0.0, top_p=1.0, top_k=None)
        sampled_batch = self._run(samples, 0, seeded, group_size=self._recipe.eval_samples)
        greedy_batch = self._run(samples, 0, greedy, group_size=1)
        return {
            "eval_reward": float(sampled_batch["rewards"].double().mean()),
            "eval_reward_greedy": float(greedy_batch["rewards"].double().mean()),
        }

    def _run(
        self, samples: Sequence[Mapping[str, Any]], first: int, sampling: SamplingParams, group_size: int
    ) -> SequenceBatch:
        inner = SingleTurnWorkflow(reward=self._reward, sampling=sampling, group_size=group_size)
        numbered = [{**sample, NUMBER: first + index} for index, sample in enumerate(samples)]
        return self._engine.rollout(
            numbered, NumberedWorkflow(inner=inner), timeout=self._recipe.rollout.timeout_s
        )
