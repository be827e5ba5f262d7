"""Checks of a run that trains on rollouts: the algorithm, the sampling, the filter and the lengths."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from core_rl.config.base import Config
from core_rl.errors import ConfigError, raise_all
from core_rl.rollout.workflow import AcceptFn
from core_rl_trainer.algorithms.fields import BASELINE_REWARDS, BOOTSTRAP, PROXIMAL, REFERENCE, VALUES
from core_rl_trainer.algorithms.interface import ModelInterface
from core_rl_trainer.algorithms.ppo_critic import PPOCriticInterface
from core_rl_trainer.data.examples import Example
from core_rl_trainer.data.kinds import ExampleKind
from core_rl_trainer.recipe.rollout import RolloutSection
from core_rl_trainer.rewards.calls import ENDINGS, describe_error, name_of
from core_rl_trainer.rewards.functions import rewards_differ
from core_rl_trainer.rewards.text import AnswerCheck

logger = logging.getLogger(__name__)

FROM_CRITIC = frozenset({VALUES, BOOTSTRAP})
PROVIDED = frozenset({PROXIMAL, REFERENCE, BASELINE_REWARDS}) | FROM_CRITIC


def check_filter(name: str | None, should_accept: AcceptFn | None, *, has_rewards: bool) -> None:
    """Refuse `rewards_differ` where the reward model alone decides: before its scores all rewards are 0."""
    if should_accept is rewards_differ and not has_rewards:
        raise ConfigError(
            f"rollout.should_accept = {name!r} would reject every prompt: it compares rewards "
            "before the scores of the reward_model are added; set algorithm.args.drop_equal_groups=true instead"
        )


def with_answer_checks(kind: ExampleKind, rewards: Iterable[Callable[..., Any]]) -> ExampleKind:
    """``kind``, whose examples have an ``answer`` that all ``rewards`` can compare with; see `AnswerCheck`."""
    checks: dict[str, AnswerCheck] = {
        name_of(reward): reward.check_answer for reward in rewards if hasattr(reward, "check_answer")
    }

    def check(example: Example) -> str | None:
        if (problem := kind.check(example)) is not None:
            return problem
        problems = {name: _answer_problem(reads, example.get("answer")) for name, reads in checks.items()}
        return next(
            (
                f"has an 'answer' that {text}; the reward {name} cannot compare with it: correct it, or name its "
                "column in data.columns.answer"
                for name, text in problems.items()
                if text
            ),
            None,
        )

    return replace(kind, check=check) if checks else kind


def _answer_problem(check: AnswerCheck, answer: object) -> str | None:
    try:
        return check(answer)
    except (Exception, *ENDINGS) as error:  # noqa: BLE001  (a user's code: the error names its line)
        return f"has no check, since check_answer {describe_error(error, check).splitlines()[0]}"


def check_token_ids(rollout: RolloutSection, vocabulary: int) -> None:
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


def longest_prompt(context: int | None, rollout: RolloutSection) -> int | None:
    """The most tokens of a prompt that leave room for a completion; with an environment, for a single token.

    None where the model has no limit to its ``context``.
    """
    if context is None:
        return None
    needed = 1 if rollout.environment else rollout.max_new_tokens
    if needed >= context:
        raise ConfigError(
            f"rollout.max_new_tokens = {needed} leaves no room for a prompt in the context of {context} tokens; "
            "lower it"
        )
    return context - needed


def check_sampling(rollout: RolloutSection) -> None:
    """Refuse, or warn of, completions from another distribution than the trained log-probs."""
    changed = ", ".join(rollout.sampling().off_distribution)
    if not changed:
        return
    message = (
        f"rollout: with {changed} completions come from another distribution than the log-probs that are "
        "trained on"
    )
    if rollout.off_distribution == "refuse":
        raise ConfigError(
            f"{message}\nfix: leave it out, or accept biased gradients with rollout.off_distribution=warn"
        )
    logger.warning("%s: the gradients are biased", message)


def check_algorithm(
    name: str, algorithm: ModelInterface[Config], *, has_critic: bool, has_reward_model: bool, group_size: int
) -> None:
    """Raise `ConfigError` where the algorithm and the sections of the recipe do not match."""
    fields = algorithm.wanted_fields
    if isinstance(algorithm, PPOCriticInterface):
        raise ConfigError(
            f"the interface {name!r} trains a critic, which needs an actor; set algorithm.type=ppo, and put "
            "these settings into the section 'critic'"
        )
    unknown = sorted(fields - PROVIDED)
    if unknown:
        raise ConfigError(
            f"the interface {name!r} wants the fields {unknown}, which this loop cannot provide"
        )
    if fields & FROM_CRITIC and not has_critic:
        raise ConfigError(
            f"the interface {name!r} needs a critic; add a section 'critic' to the recipe ('critic: {{}}')"
        )
    if algorithm.compares_completions and group_size == 1:
        raise ConfigError(
            f"rollout.group_size = 1: the interface {name!r} compares the completions of a prompt with each other, so "
            "that all advantages would be 0; set it to 2 or more (often 8), or take algorithm.type=reinforce_plus_plus"
        )
    if has_critic and not fields & FROM_CRITIC:
        raise ConfigError(
            f"the interface {name!r} has no use for a critic; remove the section 'critic', or set "
            "algorithm.args.advantage=gae"
        )
    if BASELINE_REWARDS in fields and has_reward_model:
        raise ConfigError(
            f"the interface {name!r} compares with the reward of a greedy completion, which a reward_model does not "
            "score; use a reward function, or 'rloo'"
        )
