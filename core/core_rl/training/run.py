"""A whole run: what ``core-rl train`` does with a recipe, from the first check to the last file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from core_rl.algorithms.interface import (
    ModelInterface,
    ModelInterfaceAbstraction,
    interface_class,
    make_interface,
)
from core_rl.algorithms.policy_loss import PROXIMAL, REFERENCE
from core_rl.checkpoint.run import RunCheckpoint
from core_rl.errors import ConfigError
from core_rl.rollout.process_reward import ProcessReward
from core_rl.training.data import PromptDataset
from core_rl.training.loop import TrainingLoop
from core_rl.training.metrics_log import MetricsLog
from core_rl.training.named import load_named
from core_rl.training.plot import plot_rewards
from core_rl.training.progress import TrainingProgress, print_result
from core_rl.training.recipe import Recipe, load_recipe
from core_rl.training.rewards import NamedReward, TextReward
from core_rl.training.roles import open_roles, plan_roles
from core_rl.training.rollouts import Rollouts, UserCode
from core_rl.training.run_directory import RunDirectory, open_run_directory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["run_recipe", "train"]


def run_recipe(path: Path, overrides: list[str], console: Console | None = None) -> dict[str, Any]:
    """Train as the recipe at ``path`` says, with dotted ``overrides``; the result as plain values.

    A run that was interrupted goes on from its last complete checkpoint; one that is complete is only
    reported. Progress goes to ``console``, by default to stderr.
    """
    return train(load_recipe(path, overrides), console or Console(stderr=True))


def train(recipe: Recipe, console: Console) -> dict[str, Any]:
    """Train as ``recipe`` says; see `run_recipe`. What is wrong in it is found before an engine starts."""
    algorithm = _make_algorithm(recipe)
    plan = plan_roles(recipe, algorithm.wanted_fields)
    loaded = _load_user_code(recipe)
    tokenizer = _load_tokenizer(recipe.model.path)
    train_data, eval_data = (
        PromptDataset(Path(path), tokenizer, _longest_prompt(recipe), recipe.data.too_long == "drop")
        for path in (recipe.data.train, recipe.data.eval)
    )
    with open_run_directory(recipe) as directory:
        result = directory.result()
        if result is None:
            checkpoint = directory.checkpoints.latest()
            with open_roles(plan) as roles, _open_user_code(recipe, loaded, tokenizer) as user:
                rollouts = Rollouts(recipe, roles.rollout, user)
                data = (train_data, eval_data)
                loop = TrainingLoop(recipe, algorithm, roles, rollouts, data, directory.weights)
                result = _Run(recipe, directory, loop, console).run(checkpoint)
                algorithm.save(roles.actor, str(directory.model), tokenizer_path=recipe.model.path)
            directory.finish(result)
        else:
            text = f"the run in {directory.path} is complete; fresh=true starts it over"
            console.print(text, highlight=False, soft_wrap=True)
    print_result(console, result)
    return result


def _make_algorithm(recipe: Recipe) -> ModelInterface[Any]:
    """The recipe's model interface; it gets the temperature of the rollouts, where it has such a setting."""
    chosen = recipe.algorithm
    fields = interface_class(chosen.type_).config_class.model_fields
    shared = {"temperature": recipe.rollout.temperature} if "temperature" in fields else {}
    algorithm = make_interface(ModelInterfaceAbstraction(chosen.type_, shared | chosen.args))
    unknown = sorted(algorithm.wanted_fields - {PROXIMAL, REFERENCE})
    if unknown:
        raise ConfigError(
            f"the interface {chosen.type_!r} wants the fields {unknown}, which this loop cannot provide"
        )
    return algorithm


def _load_user_code(recipe: Recipe) -> dict[str, Any]:
    """What the recipe names, by the last part of its field; `ConfigError` for what is not there."""
    named = {
        "reward": recipe.reward,
        "rollout.environment": recipe.rollout.environment,
        "rollout.should_accept": recipe.rollout.should_accept,
    }
    return {
        field.rpartition(".")[2]: None if name is None else load_named(field, name)
        for field, name in named.items()
    }


@contextmanager
def _open_user_code(
    recipe: Recipe, loaded: dict[str, Any], tokenizer: PreTrainedTokenizerBase
) -> Iterator[UserCode]:
    """What `_load_user_code` loaded, ready to be called; the processes of the reward end on the way out."""
    chosen, reward, make = recipe.rollout, loaded["reward"], loaded["environment"]
    with ExitStack() as stack:
        if recipe.reward is not None and chosen.reward_processes:
            assert chosen.reward_timeout_s is not None
            named, count = NamedReward(recipe.reward), chosen.reward_processes
            remote = ProcessReward(named, processes=count, timeout_s=chosen.reward_timeout_s)
            reward = stack.enter_context(remote)
        yield UserCode(
            reward=None if reward is None else TextReward(reward, tokenizer),
            environment=None if make is None else partial(make, tokenizer),
            should_accept=loaded["should_accept"],
        )


def _longest_prompt(recipe: Recipe) -> int | None:
    """How many tokens of a prompt leave room for an answer; with an environment, for a single token."""
    context = _context_length(recipe.model.path)
    if context is None:
        return None
    return context - (1 if recipe.rollout.environment else recipe.rollout.max_new_tokens)


def _context_length(path: str) -> int | None:
    """The most tokens of a sequence (``max_position_embeddings``); None where the model's config does not say."""
    config = json.loads(Path(path, "config.json").read_text(encoding="utf-8"))
    found = config.get("max_position_embeddings") or config.get("n_positions")
    return int(found) if found else None


def _load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path = {path!r}: its tokenizer cannot be loaded: {error}") from error
    return tokenizer


class _Run:
    """The steps of a run, with all records of them."""

    def __init__(self, recipe: Recipe, directory: RunDirectory, loop: TrainingLoop, console: Console) -> None:
        self._recipe = recipe
        self._directory = directory
        self._loop = loop
        self._console = console
        self._evaluations: dict[str, dict[str, float]] = {}
        """Step, as text since JSON has no other keys, to the mean rewards on the held-out prompts."""

    def run(self, checkpoint: RunCheckpoint | None) -> dict[str, Any]:
        """Train to the last step, from the first or from ``checkpoint``; the result as plain values."""
        recipe, directory = self._recipe, self._directory
        done = checkpoint.step if checkpoint else 0
        with (
            MetricsLog(directory.path, done if checkpoint else -1) as log,
            TrainingProgress(self._console, recipe.steps, done) as progress,
        ):
            self._begin(checkpoint, log, progress)
            for step in range(done + 1, recipe.steps + 1):
                metrics = self._loop.step(step)
                progress.update(step, metrics)
                if step == recipe.steps or (recipe.eval_every and step % recipe.eval_every == 0):
                    metrics |= self._evaluate(step)
                log.write(step, metrics)
                if step == recipe.steps or step % recipe.save_every == 0:
                    log.sync()
                    self._save(step)
            drawn = plot_rewards(log.rows, directory.picture, f"{recipe.engine}, seed {recipe.seed}")
        return self._result(drawn)

    def _begin(self, checkpoint: RunCheckpoint | None, log: MetricsLog, progress: TrainingProgress) -> None:
        if checkpoint is not None:
            progress.say(f"going on from the checkpoint of step {checkpoint.step} in {self._directory.path}")
            self._loop.restore(checkpoint)
            self._evaluations = dict(checkpoint.state["evaluations"])
        else:
            self._loop.publish(0)
            log.write(0, self._evaluate(0))

    def _evaluate(self, step: int) -> dict[str, float]:
        self._evaluations[str(step)] = found = self._loop.evaluate()
        return found

    def _save(self, step: int) -> None:
        state = self._loop.state_dict() | {"evaluations": self._evaluations}
        self._directory.checkpoints.save(step, self._loop.parts(), state)

    def _result(self, drawn: bool) -> dict[str, Any]:
        recipe, directory = self._recipe, self._directory
        return {
            "engine": recipe.engine,
            "seed": recipe.seed,
            "steps": recipe.steps,
            "before": self._evaluations["0"],
            "after": self._evaluations[str(recipe.steps)],
            "output_dir": str(directory.path),
            "model": str(directory.model),
            "metrics": str(directory.path / "metrics.jsonl"),
            "picture": str(directory.picture) if drawn else None,
        }
