"""A whole run: ``core-rl train``, from the first check of the recipe to the last file."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

from core_rl.checkpoint.run import RunCheckpoint
from core_rl.config.base import Config
from core_rl.engine.schedule import schedule_length
from core_rl.errors import BatchError, ConfigError, CoreRLError, raise_all
from core_rl.launch.hosts import Hosts
from core_rl.launch.process import end_if_rank_imports_script
from core_rl.servers.config import ServerEngineConfig
from core_rl.servers.machine import machine_problems
from core_rl_trainer.algorithms.interface import (
    ModelInterface,
    ModelInterfaceAbstraction,
    interface_class,
    make_interface,
)
from core_rl_trainer.algorithms.sft import SupervisedInterface
from core_rl_trainer.callbacks import Callback
from core_rl_trainer.errors import StepError
from core_rl_trainer.logs.progress import TrainingProgress, print_result, say
from core_rl_trainer.logs.records import RunRecords
from core_rl_trainer.logs.terminal_log import TerminalLog
from core_rl_trainer.logs.trackio_log import require_trackio
from core_rl_trainer.logs.wandb_log import require_wandb
from core_rl_trainer.outputs.push import push_run, require_hub
from core_rl_trainer.plan.memory import RunPlan, plan_run
from core_rl_trainer.plan.preflight import preflight
from core_rl_trainer.plan.remarks import plan_remarks
from core_rl_trainer.plan.run_plan import PreparedRun
from core_rl_trainer.recipe.recipe import Recipe, RecipeSource, load_recipe
from core_rl_trainer.run.callbacks import Callbacks
from core_rl_trainer.run.cluster import check_machines, open_cluster
from core_rl_trainer.run.online import prepare_online
from core_rl_trainer.run.parts import has_portable, readable_part
from core_rl_trainer.run.restarts import Restarts
from core_rl_trainer.run.run_directory import RunDirectory, open_run_directory
from core_rl_trainer.run.signals import StopSignals
from core_rl_trainer.run.source import find_source
from core_rl_trainer.run.steps import RunSteps
from core_rl_trainer.run.supervised import prepare_supervised

__all__ = ["dry_run", "prepare", "run_recipe", "train"]

logger = logging.getLogger(__name__)

FOR_ROLLOUTS = ("rollout", "reward", "rewards", "eval_samples", "colocated", "placement")
"""Fields that are read only where completions are generated."""


def run_recipe(path: Path, overrides: list[str], console: Console | None = None) -> dict[str, Any]:
    """`train`, as the command line calls it."""
    return train(path, overrides, console=console)


def train(
    recipe: RecipeSource,
    overrides: Sequence[str] = (),
    *,
    callbacks: Sequence[Callback] = (),
    console: Console | None = None,
) -> dict[str, Any]:
    """Train as ``recipe`` says, with dotted ``overrides``; the result as plain values.

    ``callbacks`` get the events of the run, after those that the recipe names. An interrupted run resumes from its
    last complete checkpoint; one that is complete is only reported. Progress goes to ``console``, by default to stderr.

    Raises `ConfigError` for what is wrong in the recipe, before an engine starts; `CallbackError` for an error of a
    callback; `RunStopped` where a signal or ``stop_on`` ends the run.
    """
    end_if_rank_imports_script()
    console, signals, log = console or Console(stderr=True), StopSignals(), TerminalLog()
    with log.attached(), signals.caught():
        chosen = load_recipe(recipe, overrides)
        remarks = preflight(chosen)
        called = Callbacks(chosen, callbacks)
        prepared = prepare(chosen)
        _require_servers(chosen, prepared)
        chosen = called.recipe = prepared.recipe
        for remark in (*remarks, *plan_remarks(chosen, prepared)):
            logger.warning("%s", remark)
        for line in prepared.data.lines():
            say(console, line)
        with open_run_directory(chosen) as directory:
            log.open(directory.log)
            result = directory.result()
            checkpoint = directory.checkpoint() if _goes_on(chosen, result) else None
            if result is not None and (checkpoint is None or not _left_to_do(chosen, prepared, checkpoint)):
                text = f"the run in {directory.path} is complete; a larger steps extends it, fresh=true starts it over"
                say(console, text)
            else:
                with called:
                    result = _trained(chosen, prepared, directory, console, signals, called)
            print_result(console, result)
            if not result.get("stopped") and (url := push_run(chosen, directory, result)) is not None:
                say(console, f"uploaded to {url}")
    return result


def _goes_on(recipe: Recipe, result: Mapping[str, Any] | None) -> bool:
    """Whether a run with this ``result`` may have steps or checkpoints left to make."""
    return result is None or result["steps"] != recipe.steps or recipe.save_portable_every > 0


def _left_to_do(recipe: Recipe, prepared: PreparedRun, checkpoint: RunCheckpoint) -> bool:
    """Whether ``checkpoint`` of a finished run is not its end: it has more steps now, or lacks a part."""
    lacks_part = recipe.save_portable_every > 0 and not has_portable(checkpoint, prepared.trained())
    return checkpoint.step < recipe.steps or lacks_part


def _trained(
    recipe: Recipe,
    prepared: PreparedRun,
    directory: RunDirectory,
    console: Console,
    signals: StopSignals,
    callbacks: Callbacks,
) -> dict[str, Any]:
    """The result of `_train`, which begins again after a loss of ranks, as often as ``cluster.restarts`` allows."""
    restarts, current = Restarts(recipe, directory, console), recipe
    while True:
        opened = False
        try:
            with open_cluster(current.cluster) as hosts:
                opened = True
                check_machines(hosts, prepared, directory.path)
                return _train(current, prepared, directory, hosts, console, signals, callbacks)
        except BatchError as error:
            raise StepError(str(error)) from error
        except CoreRLError as error:
            if signals.noted:  # a scheduler's signal ends ranks as well
                raise
            current = restarts.after(error, opened)
        prepared = prepare(current)  # algorithms have a state


def _train(
    recipe: Recipe,
    prepared: PreparedRun,
    directory: RunDirectory,
    hosts: Hosts,
    console: Console,
    signals: StopSignals,
    callbacks: Callbacks,
) -> dict[str, Any]:
    """The steps from the last checkpoint on, and the files of a finished run; its result."""
    checkpoint = directory.checkpoint()
    if checkpoint is not None:
        for name, (spec, config) in prepared.trained().items():
            readable_part(checkpoint, name, spec, config.layout)
    directory.reopen()
    _warn_of_ended_schedule(recipe, directory)
    done = checkpoint.step if checkpoint else -1
    with (
        directory.transfer(),
        RunRecords(recipe, directory, done, prepared.placements, prepared.engines()) as records,
        TrainingProgress(console, recipe.steps, max(done, 0)) as progress,
        ExitStack() as engines,
    ):
        with progress.phase("building engines"):
            loop = engines.enter_context(prepared.open(directory, hosts))
        run = RunSteps(
            recipe=recipe,
            directory=directory,
            loop=loop,
            records=records,
            progress=progress,
            signals=signals,
            callbacks=callbacks,
            end_tokens=prepared.end_tokens,
        )
        result = run.run(checkpoint)
        loop.save_model(directory.model)
        if recipe.model.lora is not None:
            loop.save_adapter(directory.adapter)
        records.draw("stopped" if result["stopped"] else "complete", result["stopped"] or "")
    directory.finish(result)
    callbacks.run_end(result)
    return result


def _warn_of_ended_schedule(recipe: Recipe, directory: RunDirectory) -> None:
    """A run that is extended keeps the horizon of its schedule, at whose end the rate may be 0."""
    chosen = recipe.optimizer
    end = schedule_length(chosen, directory.schedule_steps)
    if end is not None and chosen.schedule.function is None and end < recipe.steps:
        logger.warning(
            "the learning rate stays at %g from step %d on, where its schedule ends; optimizer.schedule_steps=%d "
            "stretches it over all steps of the run",
            chosen.lr * chosen.schedule.min_lr_ratio,
            end,
            recipe.steps,
        )


def dry_run(recipe: Recipe) -> RunPlan:
    """The plan of `train`. The recipe is checked and the data is read; nothing starts, nothing is written."""
    remarks = preflight(recipe)
    Callbacks(recipe)
    prepared = prepare(recipe)
    _require_servers(recipe, prepared)
    find_source(prepared.recipe)
    return plan_run(prepared.recipe, prepared, (*remarks, *plan_remarks(prepared.recipe, prepared)))


def _require_servers(recipe: Recipe, prepared: PreparedRun) -> None:
    """Raise `ConfigError` where this machine cannot launch the servers of the rollout engine."""
    _, config = prepared.roles.get("rollout", (None, None))
    if isinstance(config, ServerEngineConfig) and not recipe.placement.serves_on_machines(recipe.cluster):
        raise_all(ConfigError, f"engines.{recipe.rollout.engine}", machine_problems(config))


def prepare(recipe: Recipe) -> PreparedRun:
    """All checks of ``recipe``, and its data."""
    if recipe.epochs is None:  # before the data is read
        schedule_length(recipe.optimizer, recipe.steps)
    prepared = _prepared(recipe)
    schedule_length(recipe.optimizer, prepared.recipe.steps)
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
    require_trackio(recipe.trackio)
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
