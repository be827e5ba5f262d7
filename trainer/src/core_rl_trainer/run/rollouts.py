"""Rollouts of a run: samples depend on the seed, the position in the data order, and the weights alone."""

from __future__ import annotations

import gc
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from core_rl.data.batch import SequenceBatch
from core_rl.data.requests import SamplingParams
from core_rl.engine.inference import InferenceEngine
from core_rl.errors import RolloutError
from core_rl.rollout.workflow import RolloutWorkflow, TokenGenerator
from core_rl.seeds import derive_seed
from core_rl_trainer.data.batches import NumberedBatches, row_of
from core_rl_trainer.data.plain import NUMBER
from core_rl_trainer.logs.samples import Evaluation, rollout_samples
from core_rl_trainer.recipe.rollout import RolloutSection
from core_rl_trainer.rewards.terms import reward_metrics
from core_rl_trainer.workflows.episodes import GreedyBaselineWorkflow, MultiTurnWorkflow, SingleTurnWorkflow
from core_rl_trainer.workflows.user_code import UserCode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TRAINING, EVALUATION = 0, 1
"""Streams of seeds."""

ALLOCATIONS = 50_000
"""Objects that are made between two collections of garbage."""
SHOWN = 120
"""Characters of a prompt that an error shows."""


@contextmanager
def rare_collections() -> Iterator[None]:
    """Run the garbage collector seldom, since it reads all completions in flight; leave out the present objects."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(ALLOCATIONS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


@dataclass(frozen=True, kw_only=True)
class NumberedWorkflow:
    """Runs ``inner`` under the number that the sample carries, instead of the count of episodes so far.

    So an evaluation changes nothing in the training after it, and neither does a resume.
    """

    inner: RolloutWorkflow

    async def arun_episode(
        self, engine: TokenGenerator, data: Mapping[str, Any], episode: int
    ) -> SequenceBatch | None:
        """The sequences of one sample. A `RolloutError` names the prompt."""
        try:
            return await self.inner.arun_episode(engine, data, int(data[NUMBER]))
        except RolloutError as error:
            prompt = textwrap.shorten(repr(data.get("prompt")), SHOWN)
            raise RolloutError(f"prompt {prompt}: {error}") from error


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """Completions of prompts, for training and for evaluation, with the settings of a run."""

    engine: InferenceEngine
    user: UserCode
    tokenizer: PreTrainedTokenizerBase
    settings: RolloutSection
    seed: int
    eval_samples: int
    """Sampled completions of each evaluation prompt."""
    with_baseline: bool
    """Whether training needs a greedy completion of each prompt."""

    @cached_property
    def _training(self) -> RolloutWorkflow:
        sampled = self._workflow(self._sampling(TRAINING), self.settings.group_size)
        if not self.with_baseline:
            return sampled
        return GreedyBaselineWorkflow(sampled=sampled, greedy=self._workflow(self._greedy, 1))

    @property
    def _greedy(self) -> SamplingParams:
        return replace(self.settings.sampling(), temperature=0.0, top_p=1.0, top_k=None, min_p=0.0)

    def _sampling(self, stream: int) -> SamplingParams:
        return replace(self.settings.sampling(), seed=derive_seed(self.seed, stream))

    # --------------------------------------------------------------- training

    def training_batch(self, step: int, batches: Iterator[Sequence[Mapping[str, Any]]]) -> SequenceBatch:
        """Groups of completions of the prompts of ``step``, drawn from ``batches`` as far ahead as the recipe allows.

        Raises `RolloutError` when a completion comes from weights that are older than that, or newer than the engine's.
        """
        settings = self.settings
        batch = self.engine.prepare_batch(
            batches, self._training, settings.batch_limit_s, self.user.should_accept
        )
        version, drawn = self.engine.get_version(), batch["versions"][batch.loss_mask]
        limit = settings.max_head_offpolicyness
        if bool(((drawn > version) | (drawn < version - limit)).any()):
            raise RolloutError(
                f"step {step}: tokens of the versions {int(drawn.min())} to {int(drawn.max())} at version {version}, "
                f"and rollout.max_head_offpolicyness = {limit}; the rollout engine did not take the newest weights"
            )
        return batch

    def counters(self) -> dict[str, float]:
        """Prompts that run or wait, and prompts rejected since the start of the run."""
        counted = self.engine.rollouts.counters()
        ahead = counted["waiting"] + counted["running"] + counted["accepted"] - counted["consumed"]
        return {"prompts_ahead": float(ahead), "prompts_rejected": float(counted["rejected"])}

    def state_dict(self) -> dict[str, Any]:
        """Counts, and the rows of the prompts that were drawn and not consumed; JSON."""
        state = self.engine.rollouts.state_dict()
        outstanding = [{**entry, "data": row_of(entry["data"])} for entry in state["outstanding"]]
        return {**state, "outstanding": outstanding}

    def load_state_dict(self, state: Mapping[str, Any], batches: NumberedBatches) -> None:
        """Resume from there: the prompts are read again from the data of ``batches``, and submitted again."""
        outstanding = [{**entry, "data": batches.sample_at(entry["data"])} for entry in state["outstanding"]]
        self.engine.rollouts.load_state_dict(
            {**state, "outstanding": outstanding}, self._training, self.user.should_accept
        )

    # ------------------------------------------------------------- evaluation

    def evaluate(
        self,
        samples: Sequence[Mapping[str, Any]],
        scored: Callable[[SequenceBatch, SequenceBatch], tuple[SequenceBatch, ...]],
    ) -> Evaluation:
        """Mean rewards over ``samples``: of sampled completions, with the same seeds each time, and of greedy ones.

        ``scored`` completes the rewards. Some of the sampled completions are kept as text.
        """
        sampled = self._completions(samples, self._sampling(EVALUATION), self.eval_samples)
        greedy = self._completions(samples, self._greedy, 1)
        sampled, greedy = scored(sampled, greedy)
        return Evaluation(
            metrics={
                "eval_reward": float(sampled["rewards"].double().mean()),
                "eval_reward_greedy": float(greedy["rewards"].double().mean()),
                **reward_metrics(sampled, "eval_"),
            },
            samples=rollout_samples(sampled, self.tokenizer, samples),
        )

    def _completions(
        self, samples: Sequence[Mapping[str, Any]], sampling: SamplingParams, group_size: int
    ) -> SequenceBatch:
        numbered = [{**sample, NUMBER: number} for number, sample in enumerate(samples)]
        workflow = self._workflow(sampling, group_size)
        return self.engine.rollout(numbered, workflow, self.settings.batch_limit_s)

    def _workflow(self, sampling: SamplingParams, group_size: int) -> RolloutWorkflow:
        settings, user = self.settings, self.user
        # Processes know when a call begins; from here its wait for a free one would count.
        limit = None if settings.reward_processes else settings.reward_limit_s
        inner: RolloutWorkflow
        if user.environment is not None:
            inner = MultiTurnWorkflow(
                environment=user.environment,
                reward=user.reward,
                sampling=sampling,
                group_size=group_size,
                max_turns=settings.max_turns,
                max_tokens=self.engine.limits.context_length,
                vocabulary=self.engine.limits.vocab_size,
                step_timeout_s=settings.step_limit_s,
                reward_timeout_s=limit,
            )
        else:
            inner = SingleTurnWorkflow(
                reward=user.reward, sampling=sampling, group_size=group_size, reward_timeout_s=limit
            )
        return NumberedWorkflow(inner=inner)
