"""Training on rollouts: the checks, the data and the engines behind a `TrainingLoop`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from core_rl.errors import ConfigError
from core_rl_trainer.algorithms.fields import BASELINE_REWARDS, BOOTSTRAP, PROXIMAL, REFERENCE, VALUES
from core_rl_trainer.algorithms.interface import ModelInterface, ModelInterfaceAbstraction, make_interface
from core_rl_trainer.algorithms.ppo_critic import PPOCriticInterface
from core_rl_trainer.algorithms.updates import UpdatesConfig
from core_rl_trainer.data.encoding import context_length, load_tokenizer
from core_rl_trainer.data.kinds import PROMPTS
from core_rl_trainer.data.statistics import describe_data
from core_rl_trainer.data.training_data import TrainingData, load_training_data
from core_rl_trainer.loop.loop import TrainingLoop
from core_rl_trainer.loop.prepared import PreparedRun, Workload
from core_rl_trainer.loop.roles import open_roles, plan_roles
from core_rl_trainer.loop.rollouts import Rollouts, UserCode
from core_rl_trainer.loop.run_directory import RunDirectory
from core_rl_trainer.recipe.recipe import Recipe
from core_rl_trainer.rewards.functions import RewardFn, load_callable
from core_rl_trainer.rewards.process import ProcessReward
from core_rl_trainer.rewards.text import NamedReward, TextReward, TextRewardFn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["prepare_online"]

FROM_CRITIC = frozenset({VALUES, BOOTSTRAP})
PROVIDED = frozenset({PROXIMAL, REFERENCE, BASELINE_REWARDS}) | FROM_CRITIC


def prepare_online(recipe: Recipe, algorithm: ModelInterface[Any]) -> PreparedRun:
    """All checks and the data."""
    _check_fields(recipe, algorithm)
    critic = None
    if recipe.critic is not None:
        critic = make_interface(ModelInterfaceAbstraction("ppo_critic", recipe.critic.args))
    plan = plan_roles(recipe, algorithm.wanted_fields)
    loaded = _load_user_code(recipe)
    tokenizer = load_tokenizer(recipe.model.path)
    limit, budget = _longest_prompt(recipe), _prompt_budget(recipe)
    data = load_training_data(recipe.data, PROMPTS, tokenizer, recipe.seed, limit=limit, budget=budget)

    @contextmanager
    def opened(directory: RunDirectory) -> Iterator[TrainingLoop]:
        with open_roles(plan) as roles, _open_user_code(recipe, loaded, tokenizer) as user:
            baseline = BASELINE_REWARDS in algorithm.wanted_fields
            rollouts = Rollouts(recipe, roles.rollout, user, tokenizer, baseline)
            yield TrainingLoop(recipe, algorithm, critic, roles, rollouts, data, directory.weights)

    return PreparedRun(
        roles=plan.roles(),
        placements=plan.placements(),
        workload=_workload(recipe, algorithm, data),
        data=describe_data(
            data, seed=recipe.seed, batch_size=recipe.rollout.prompts_per_step, ranks=1, budget=None
        ),
        open=opened,
    )


def _workload(recipe: Recipe, algorithm: ModelInterface[Any], data: TrainingData) -> Workload:
    chosen, context = recipe.rollout, context_length(recipe.model.path)
    config = algorithm.config
    updates = config.minibatches * config.epochs if isinstance(config, UpdatesConfig) else 1
    longest = min(data.train.longest + _completion_tokens(recipe), context or sys.maxsize)
    return Workload(
        examples=len(data.train),
        held_out=len(data.held_out) if data.held_out is not None else 0,
        examples_per_step=chosen.prompts_per_step,
        sequences_per_example=chosen.group_size,
        longest=longest,
        largest_unit=longest,
        updates_per_step=updates,
    )


def no_reward(
    prompt_ids: Sequence[int],  # noqa: ARG001
    output_ids: Sequence[int],  # noqa: ARG001
    data: Mapping[str, Any],  # noqa: ARG001
) -> float:
    """0 for every completion, where the reward model alone decides."""
    return 0.0


def _load_user_code(recipe: Recipe) -> dict[str, Any]:
    """The functions that the recipe names, by the last part of the field. Raises `ConfigError`."""
    named = {
        "reward": recipe.reward,
        "rollout.environment": recipe.rollout.environment,
        "rollout.should_accept": recipe.rollout.should_accept,
    }
    return {
        field.rpartition(".")[2]: None if name is None else load_callable(field, name)
        for field, name in named.items()
    }


@contextmanager
def _open_user_code(
    recipe: Recipe, loaded: dict[str, Any], tokenizer: PreTrainedTokenizerBase
) -> Iterator[UserCode]:
    """The functions of `_load_user_code`, ready to be called; processes of the reward end with the context."""
    chosen, reward, make = recipe.rollout, loaded["reward"], loaded["environment"]
    with ExitStack() as stack:
        if recipe.reward is not None and chosen.reward_processes:
            assert chosen.reward_timeout_s is not None
            named, count = NamedReward(recipe.reward), chosen.reward_processes
            remote = ProcessReward(named, processes=count, timeout_s=chosen.reward_timeout_s)
            reward = stack.enter_context(remote)
        yield UserCode(
            reward=_token_reward(recipe, reward, tokenizer),
            environment=None if make is None else partial(make, tokenizer),
            should_accept=loaded["should_accept"],
        )


def _completion_tokens(recipe: Recipe) -> int:
    """The most tokens that the model writes after a prompt."""
    chosen = recipe.rollout
    return chosen.max_new_tokens * (chosen.max_turns if chosen.environment else 1)


def _prompt_budget(recipe: Recipe) -> int:
    """The most tokens of a prompt whose whole sequence fits into a micro-batch."""
    return max(1, recipe.micro_batch_tokens - _completion_tokens(recipe))


def _longest_prompt(recipe: Recipe) -> int | None:
    """The most tokens of a prompt that leave room for a completion; with an environment, for a single token."""
    context = context_length(recipe.model.path)
    if context is None:
        return None
    needed = 1 if recipe.rollout.environment else recipe.rollout.max_new_tokens
    if needed >= context:
        raise ConfigError(
            f"rollout.max_new_tokens = {needed} leaves no room for a prompt in the context of {context} tokens; "
            "lower it"
        )
    return context - needed


def _token_reward(
    recipe: Recipe, reward: TextRewardFn | None, tokenizer: PreTrainedTokenizerBase
) -> RewardFn | None:
    """The reward of token ids; None leaves it to the environment."""
    if reward is not None:
        return TextReward(reward, tokenizer)
    return None if recipe.rollout.environment else no_reward


def _check_fields(recipe: Recipe, algorithm: ModelInterface[Any]) -> None:
    """Raise `ConfigError` where the algorithm wants what the recipe does not give, or the other way round."""
    name, wanted = recipe.algorithm.type_, algorithm.wanted_fields
    if isinstance(algorithm, PPOCriticInterface):
        raise ConfigError(
            f"the interface {name!r} trains a critic, which needs an actor; set algorithm.type_=ppo, and put "
            "these settings into the section 'critic'"
        )
    unknown = sorted(wanted - PROVIDED)
    if unknown:
        raise ConfigError(
            f"the interface {name!r} wants the fields {unknown}, which this loop cannot provide"
        )
    if wanted & FROM_CRITIC and recipe.critic is None:
        raise ConfigError(
            f"the interface {name!r} needs a critic; add a section 'critic' to the recipe ('critic: {{}}')"
        )
    if recipe.critic is not None and not wanted & FROM_CRITIC:
        raise ConfigError(
            f"the interface {name!r} has no use for a critic; remove the section 'critic', or set "
            "algorithm.args.advantage=gae"
        )
    if BASELINE_REWARDS in wanted and recipe.reward_model is not None:
        raise ConfigError(
            f"the interface {name!r} compares with the reward of a greedy completion, which a reward_model does not "
            "score; use a reward function, or 'rloo'"
        )
