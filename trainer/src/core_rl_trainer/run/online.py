"""Training on rollouts: the checks, the data and the engines behind a `TrainingLoop`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from core_rl.backend.meta import FinetuneSpec
from core_rl.errors import ConfigError, raise_all
from core_rl.launch.hosts import Hosts
from core_rl.rollout.workflow import AcceptFn
from core_rl_trainer.algorithms.fields import BASELINE_REWARDS, BOOTSTRAP, PROXIMAL, REFERENCE, VALUES
from core_rl_trainer.algorithms.interface import ModelInterface, ModelInterfaceAbstraction, make_interface
from core_rl_trainer.algorithms.ppo_critic import PPOCriticInterface
from core_rl_trainer.algorithms.updates import UpdatesConfig
from core_rl_trainer.data.end_tokens import require_end_tokens
from core_rl_trainer.data.kinds import PROMPTS
from core_rl_trainer.data.statistics import describe_data
from core_rl_trainer.data.tokenizers import (
    context_length,
    load_tokenizer,
    vocabulary_size,
)
from core_rl_trainer.data.training_data import TrainingData, load_training_data
from core_rl_trainer.data.vocabulary import check_same_tokens
from core_rl_trainer.plan.engines import plan_roles
from core_rl_trainer.plan.run_plan import PreparedRun, Workload
from core_rl_trainer.plan.template_time import with_template_time
from core_rl_trainer.recipe.recipe import Recipe
from core_rl_trainer.recipe.rollout import RolloutSection
from core_rl_trainer.rewards.functions import rewards_differ
from core_rl_trainer.run.loop import TrainingLoop
from core_rl_trainer.run.restarts import check_layouts
from core_rl_trainer.run.roles import open_roles
from core_rl_trainer.run.rollouts import Rollouts
from core_rl_trainer.run.run_directory import RunDirectory
from core_rl_trainer.run.user_code import load_user_code, open_user_code

__all__ = ["prepare_online"]

logger = logging.getLogger(__name__)

FROM_CRITIC = frozenset({VALUES, BOOTSTRAP})
PROVIDED = frozenset({PROXIMAL, REFERENCE, BASELINE_REWARDS}) | FROM_CRITIC


def prepare_online(recipe: Recipe, algorithm: ModelInterface[Any]) -> PreparedRun:
    """All checks and the data."""
    _check_fields(recipe, algorithm)
    _check_sampling(recipe.rollout)
    critic = None
    if recipe.critic is not None:
        critic = make_interface(ModelInterfaceAbstraction("ppo_critic", recipe.critic.args))
    plan = plan_roles(recipe, algorithm.wanted_fields)
    check_layouts(recipe, lambda fewer: plan_roles(fewer, algorithm.wanted_fields).trained())
    loaded = load_user_code(recipe)
    _check_filter(recipe, loaded.should_accept)
    tokenizer = load_tokenizer(recipe.model.path)
    models = {"critic.path": recipe.critic, "reward_model.path": recipe.reward_model}
    check_same_tokens(
        tokenizer, {field: section.path for field, section in models.items() if section is not None}
    )
    _check_token_ids(recipe.rollout, vocabulary_size(recipe.model.path))
    ends = require_end_tokens(tokenizer, recipe.rollout.stop_token_ids, recipe.rollout.stop)
    recipe = with_template_time(recipe, tokenizer)
    limit, budget = _longest_prompt(recipe), _prompt_budget(recipe)
    data = load_training_data(
        recipe.data,
        PROMPTS,
        tokenizer,
        recipe.seed,
        limit=limit,
        budget=budget,
        vocabulary=_smallest_vocabulary(recipe),
    )
    recipe = recipe.with_steps(len(data.train), recipe.rollout.prompts_per_step)

    @contextmanager
    def opened(directory: RunDirectory, hosts: Hosts) -> Iterator[TrainingLoop]:
        prompts = recipe.rollout.prompts_per_step
        finetune = FinetuneSpec(dataset_size=directory.schedule_steps * prompts, train_batch_size=prompts)
        with open_roles(plan, finetune, hosts) as roles, open_user_code(recipe, loaded, tokenizer) as user:
            baseline = BASELINE_REWARDS in algorithm.wanted_fields
            rollouts = Rollouts(recipe, roles.rollout, user, tokenizer, baseline)
            yield TrainingLoop(recipe, algorithm, critic, roles, rollouts, data, directory.weights)

    return PreparedRun(
        recipe=recipe,
        roles=plan.roles(),
        placements=plan.placements(),
        workload=_workload(recipe, algorithm, data),
        data=describe_data(
            data,
            tokenizer,
            seed=recipe.seed,
            batch_size=recipe.rollout.prompts_per_step,
            ranks=1,
            budget=None,
        ),
        end_tokens=ends,
        open=opened,
        memory_sender=plan.sender().machine if recipe.rollout.sync == "tensor" else None,
    )


def _check_filter(recipe: Recipe, should_accept: AcceptFn | None) -> None:
    """Refuse `rewards_differ` where the reward model alone decides: before its scores all rewards are 0."""
    earned = recipe.reward_functions or recipe.rollout.environment
    if should_accept is rewards_differ and not earned:
        raise ConfigError(
            f"rollout.should_accept = {recipe.rollout.should_accept!r} would reject every prompt: it compares rewards "
            "before the scores of the reward_model are added; set algorithm.args.drop_equal_groups=true instead"
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


def _smallest_vocabulary(recipe: Recipe) -> int:
    """The ids below this have embeddings in all models of the run."""
    sections = (recipe.critic, recipe.reward_model)
    others = {section.path for section in sections if section is not None and section.path is not None}
    return min(map(vocabulary_size, {recipe.model.path, *others}))


def _check_token_ids(rollout: RolloutSection, vocabulary: int) -> None:
    """Raise one `ConfigError` for all token ids of settings that the model has no embeddings for."""
    settings: dict[str, Iterable[int]] = {
        "stop_token_ids": rollout.stop_token_ids,
        "logit_bias": rollout.logit_bias,
    }
    problems = [
        f"{field} has the token id {token:,}; the ids of the model are 0 to {vocabulary - 1:,}"
        for field, ids in settings.items()
        for token in ids
        if not 0 <= token < vocabulary
    ]
    raise_all(ConfigError, "rollout", problems)


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


def _check_sampling(rollout: RolloutSection) -> None:
    """Refuse, or warn of, completions from another distribution than the one that is trained."""
    changed = ", ".join(rollout.sampling().off_distribution)
    if not changed:
        return
    said = f"rollout: with {changed} completions come from another distribution than the log-probs that are trained on"
    if rollout.off_distribution == "refuse":
        raise ConfigError(
            f"{said}\nfix: leave it out, or accept biased gradients with rollout.off_distribution=warn"
        )
    logger.warning("%s: the gradients are biased", said)


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
    if algorithm.compares_completions and recipe.rollout.group_size == 1:
        raise ConfigError(
            f"rollout.group_size = 1: the interface {name!r} compares the completions of a prompt with each other, so "
            "that all advantages would be 0; set it to 2 or more (often 8), or take algorithm.type_=reinforce_plus_plus"
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
