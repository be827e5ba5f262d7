"""A whole run: ``core-rl train``, from the first check of the recipe to the last file."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from core_rl.checkpoint.run import RunCheckpoint
from core_rl.config.base import Config
from core_rl.errors import ConfigError
from core_rl_trainer.algorithms.interface import (
    ModelInterface,
    ModelInterfaceAbstraction,
    interface_class,
    make_interface,
)
from core_rl_trainer.algorithms.sft import SupervisedInterface
from core_rl_trainer.logs.progress import TrainingProgress, print_result
from core_rl_trainer.logs.records import RunRecords
from core_rl_trainer.logs.wandb_log import require_wandb
from core_rl_trainer.loop.best_model import BestModel
from core_rl_trainer.loop.online import prepare_online
from core_rl_trainer.loop.prepared import Loop, PreparedRun
from core_rl_trainer.loop.run_directory import RunDirectory, open_run_directory
from core_rl_trainer.loop.run_plan import RunPlan, plan_run
from core_rl_trainer.loop.supervised import prepare_supervised
from core_rl_trainer.outputs.push import push_run, require_hub
from core_rl_trainer.recipe.recipe import Recipe, load_recipe

__all__ = ["dry_run", "prepare", "run_recipe", "train"]

logger = logging.getLogger(__name__)

FOR_ROLLOUTS = ("rollout", "reward", "rewards", "eval_samples", "colocated", "placement")
"""Fields that are read only where completions are generated."""


def run_recipe(path: Path, overrides: list[str], console: Console | None = None) -> dict[str, Any]:
    """Train as the recipe at ``path`` says, with dotted ``overrides``; the result as plain values.

    An interrupted run resumes from its last complete checkpoint; one that is complete is only reported.
    Progress goes to ``console``, by default to stderr.
    """
    return train(load_recipe(path, overrides), console or Console(stderr=True))


def train(recipe: Recipe, console: Console) -> dict[str, Any]:
    """Train as ``recipe`` says; see `run_recipe`. What is wrong in it is found before an engine starts."""
    prepared = prepare(recipe)
    console.print(prepared.data.line(), highlight=False, soft_wrap=True)
    with open_run_directory(recipe) as directory:
        result = directory.result()
        if result is None:
            checkpoint = directory.checkpoints.latest()
            done = checkpoint.step if checkpoint else -1
            with (
                RunRecords(recipe, directory, done, prepared.placements) as records,
                prepared.open(directory) as loop,
            ):
                run = _Run(recipe=recipe, directory=directory, loop=loop, records=records, console=console)
                result = run.run(checkpoint)
                loop.save_model(directory.model)
                if recipe.model.lora is not None:
                    loop.save_adapter(directory.adapter)
                records.draw("complete")
            directory.finish(result)
        else:
            text = f"the run in {directory.path} is complete; fresh=true starts it over"
            console.print(text, highlight=False, soft_wrap=True)
        print_result(console, result)
        if (url := push_run(recipe, directory, result)) is not None:
            console.print(f"uploaded to {url}", highlight=False, soft_wrap=True)
    return result


def dry_run(recipe: Recipe) -> RunPlan:
    """The plan of `train`. The recipe is checked and the data is read; nothing starts, nothing is written."""
    return plan_run(recipe, prepare(recipe))


def prepare(recipe: Recipe) -> PreparedRun:
    """All checks of ``recipe``, and its data."""
    prepared = _prepared(recipe)
    largest, budget = prepared.workload.largest_unit, recipe.micro_batch_tokens
    if largest > budget:
        raise ConfigError(
            f"micro_batch_tokens = {budget:,}, and a sequence or pair that stays in one micro-batch may have "
            f"{largest:,} tokens, the completion included: raise micro_batch_tokens to {largest:,}, or lower "
            "rollout.max_new_tokens, or take shorter examples"
        )
    return prepared


def _prepared(recipe: Recipe) -> PreparedRun:
    require_wandb(recipe)
    require_hub(recipe)
    algorithm = _make_algorithm(recipe)
    if isinstance(algorithm, SupervisedInterface):
        _warn_of(recipe, "data", [repr(name) for name in FOR_ROLLOUTS if _is_set(recipe, name)])
        return prepare_supervised(recipe, algorithm)
    if _is_set(recipe.data, "batch_size"):
        _warn_of(recipe, "rollouts", ["'data.batch_size'; there is 'rollout.prompts_per_step'"])
    return prepare_online(recipe, algorithm)


def _is_set(section: Config, name: str) -> bool:
    """Whether the field ``name`` has another value than by default."""
    return bool(getattr(section, name) != type(section).model_fields[name].default)


def _warn_of(recipe: Recipe, trains_on: str, ignored: list[str]) -> None:
    if ignored:
        logger.warning(
            "%r trains on %s and does not read %s", recipe.algorithm.type_, trains_on, ", ".join(ignored)
        )


def _make_algorithm(recipe: Recipe) -> ModelInterface[Any]:
    """The recipe's model interface; it gets the temperature of the rollouts, where it has such a setting."""
    chosen = recipe.algorithm
    fields = interface_class(chosen.type_).config_class.model_fields
    shared = {"temperature": recipe.rollout.temperature} if "temperature" in fields else {}
    return make_interface(ModelInterfaceAbstraction(chosen.type_, shared | chosen.args))


@dataclass(kw_only=True)
class _Run:
    """The steps of a run, with all records of them."""

    recipe: Recipe
    directory: RunDirectory
    loop: Loop
    records: RunRecords
    console: Console
    evaluations: dict[str, dict[str, float]] = field(default_factory=dict)
    """Step, as text since JSON has no other keys, to the metrics of its evaluation."""

    def run(self, checkpoint: RunCheckpoint | None) -> dict[str, Any]:
        """Train to the last step, from the first or from ``checkpoint``; the result as plain values."""
        recipe, directory, records = self.recipe, self.directory, self.records
        done = checkpoint.step if checkpoint else 0
        found = checkpoint.state.get("best") if checkpoint else None
        best = BestModel(recipe.keep_best, directory.best, directory.best_model, found)
        records.best = best.state_dict()
        with TrainingProgress(self.console, recipe.steps, done) as progress:
            self._begin(checkpoint, best, progress)
            for step in range(done + 1, recipe.steps + 1):
                metrics = self.loop.step(step)
                progress.show(step, metrics)
                last = step == recipe.steps
                evaluated = last or (recipe.eval_every and step % recipe.eval_every == 0)
                if evaluated:
                    metrics |= self._evaluate(step, best)
                records.write(step, metrics)
                if last or step % recipe.save_every == 0:
                    records.sync()
                    self._save(step, best)
                    records.draw()
                elif evaluated:
                    records.draw()
        return self._result(best)

    def _begin(self, checkpoint: RunCheckpoint | None, best: BestModel, progress: TrainingProgress) -> None:
        if checkpoint is not None:
            progress.say(f"resuming from the checkpoint of step {checkpoint.step} in {self.directory.path}")
            self.loop.restore(checkpoint)
            self.evaluations = dict(checkpoint.state["evaluations"])
        else:
            self.loop.start()
            self.records.write(0, self._evaluate(0, best))
        self.records.draw()

    def _evaluate(self, step: int, best: BestModel) -> dict[str, float]:
        found = self.loop.evaluate()
        self.records.add_samples(step, found.samples)
        self.evaluations[str(step)] = found.metrics
        best.offer(step, found.metrics, self.loop.save_model)
        self.records.best = best.state_dict()
        return found.metrics

    def _save(self, step: int, best: BestModel) -> None:
        state = self.loop.state_dict() | {"evaluations": self.evaluations, "best": best.state_dict()}
        self.directory.checkpoints.save(step, self.loop.parts(), state)
        best.prune()

    def _result(self, best: BestModel) -> dict[str, Any]:
        recipe, directory = self.recipe, self.directory
        return {
            "engine": recipe.engine,
            "seed": recipe.seed,
            "steps": recipe.steps,
            "before": self.evaluations["0"],
            "after": self.evaluations[str(recipe.steps)],
            "best": best.state_dict(),
            "output_dir": str(directory.path),
            "model": str(directory.model),
            "adapter": str(directory.adapter) if recipe.model.lora is not None else None,
            "best_model": str(directory.best_model) if best.state_dict() else None,
            "metrics": str(directory.path / "metrics.jsonl"),
            "page": str(directory.page),
            "picture": str(directory.picture),
        }
