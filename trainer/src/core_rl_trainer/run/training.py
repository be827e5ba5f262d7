"""A run of a plan: its directory, its attempts after lost ranks, its engines and its outputs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from datetime import UTC, datetime
from typing import Any

from rich.console import Console

from core_rl.backend.meta import FinetuneSpec
from core_rl.engine.schedule import schedule_length
from core_rl.errors import BatchError, ClusterError, CoreRLError, GroupError, RankDied, RankTimeout
from core_rl.launch.hosts import Hosts
from core_rl_trainer.callbacks import Callback
from core_rl_trainer.errors import StepError
from core_rl_trainer.logs.metrics_log import WandbBoard
from core_rl_trainer.logs.page import RunPage
from core_rl_trainer.logs.progress import TerminalLog, TrainingProgress, print_line, print_result
from core_rl_trainer.outputs.push import model_card, push_model
from core_rl_trainer.plan.run_plan import RunPlan
from core_rl_trainer.plan.slots import describe_ranks, sender_slot
from core_rl_trainer.recipe.cluster import ClusterSection
from core_rl_trainer.run.best_model import BestModel
from core_rl_trainer.run.callbacks import Callbacks
from core_rl_trainer.run.cluster import check_machines, open_cluster
from core_rl_trainer.run.loop import RunLoop
from core_rl_trainer.run.online import OnlineLearner, open_online
from core_rl_trainer.run.records import RunRecords
from core_rl_trainer.run.run_directory import RunDirectory, failures_with_hint, open_run_directory
from core_rl_trainer.run.saving import has_portable, readable_part
from core_rl_trainer.run.signals import StopSignals
from core_rl_trainer.run.supervised import SupervisedLearner, open_supervised
from core_rl_trainer.run.watch import Watch

LOSSES = (ClusterError, RankDied, RankTimeout)
"""Errors after which new ranks can do what these could not."""


class Restarts:
    """The restarts that a run has left, and a record of each in the terminal, the log and the run's directory."""

    def __init__(self, cluster: ClusterSection, directory: RunDirectory, console: Console) -> None:
        self._cluster = cluster
        self._directory = directory
        self._console = console
        self._done = 0

    def begin(self, error: CoreRLError, opened: bool) -> None:
        """Count a restart after ``error``; raises it where none helps or is left. ``opened``: machines were there."""
        loss: BaseException | None = error
        while loss is not None and not isinstance(loss, LOSSES):
            loss = loss.__cause__
        limit = self._cluster.restarts
        if loss is None:
            raise error
        if not opened:
            if self._done:
                error.add_note(
                    "the same command goes on from the last checkpoint, also with fewer cluster.machines"
                )
            raise error
        if self._done >= limit:
            if limit:
                error.add_note(f"cluster.restarts = {limit}, and all of them were used")
            raise error
        logger.info("ranks were lost", exc_info=loss)
        self._done += 1
        self._record(loss)

    def _record(self, loss: GroupError) -> None:
        """Show the restart on the terminal, in the log and on the page."""
        checkpoint = self._directory.checkpoint()
        step = checkpoint.step if checkpoint is not None else 0
        start = f"the checkpoint of step {step}" if checkpoint is not None else "the beginning"
        reason = loss.message.partition("\n")[0]
        limit, number = self._cluster.restarts, self._cluster.number
        text = f"restart {self._done} of {limit}, from {start}, on {number}: {reason}"
        logger.info("%s", text)
        print_line(self._console, text)
        self._directory.add_restart(
            {
                "time": f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}",
                "step": step,
                "machines": self._cluster.machines,
                "reason": reason,
            }
        )


logger = logging.getLogger(__name__)


def run_plan(
    plan: RunPlan, added: Sequence[Callback], console: Console, signals: StopSignals, log: TerminalLog
) -> dict[str, Any]:
    """Run ``plan``; return the result as plain values. See `core_rl_trainer.api.train`."""
    callbacks = Callbacks(plan.recipe, added)
    for remark in plan.remarks:
        logger.warning("%s", remark)
    for line in plan.data_summary.lines():
        print_line(console, line)
    with open_run_directory(plan.files, plan.identity()) as directory:
        log.open(directory.log)
        result = directory.result()
        if result is None or _has_more(plan, result, directory):
            with callbacks, failures_with_hint(directory.path, plan.files.fresh):
                result = _train_with_restarts(plan, directory, console, signals, callbacks)
        else:
            text = f"the run in {directory.path} is complete; a larger steps extends it, fresh=true starts it over"
            print_line(console, text)
        print_result(console, result)
        hub, recipe = plan.recipe.push_to_hub, plan.recipe.model_dump(mode="json")
        if hub is not None and not result.get("stopped"):
            url = push_model(hub, directory.model, model_card(recipe, hub.repo_id, result))
            print_line(console, f"uploaded to {url}")
    return result


def _has_more(plan: RunPlan, result: dict[str, Any], directory: RunDirectory) -> bool:
    """Whether a finished run has steps left now, or lacks a part of its last checkpoint."""
    schedule = plan.schedule
    portable = schedule.save_portable_every > 0
    if result["steps"] == schedule.steps and not portable:
        return False
    checkpoint = directory.checkpoint()
    if checkpoint is None:
        return False
    specs = {name: engine.spec for name, engine in plan.trained.items()}
    return checkpoint.step < schedule.steps or (portable and not has_portable(checkpoint, specs))


def _train_with_restarts(
    plan: RunPlan, directory: RunDirectory, console: Console, signals: StopSignals, callbacks: Callbacks
) -> dict[str, Any]:
    """The result of `_train`, which begins again after a loss of ranks, as often as ``cluster.restarts`` allows."""
    restarts = Restarts(plan.cluster, directory, console)
    placed = plan.engines if plan.serves_on_machines else plan.trainers
    while True:
        opened = False
        try:
            with open_cluster(plan.cluster, placed, plan.recipe.device) as hosts:
                opened = True
                by_memory = plan.rollout is not None and plan.recipe.rollout.sync == "tensor"
                sender = sender_slot(plan.trainers["actor"]).machine if by_memory else None
                check_machines(hosts, plan.trainers, directory.path, sender)
                return _train(plan, directory, hosts, console, signals, callbacks)
        except BatchError as error:
            raise StepError(str(error)) from error
        except CoreRLError as error:
            if signals.noted:  # a scheduler's signal ends ranks as well
                raise
            restarts.begin(error, opened)


def _train(
    plan: RunPlan,
    directory: RunDirectory,
    hosts: Hosts,
    console: Console,
    signals: StopSignals,
    callbacks: Callbacks,
) -> dict[str, Any]:
    """The steps from the last checkpoint on, and the files of a finished run; its result."""
    checkpoint = directory.checkpoint()
    if checkpoint is not None:
        for name, engine in plan.trained.items():
            readable_part(checkpoint, name, engine.spec, engine.config.layout)
    directory.reopen()
    _warn_of_ended_schedule(plan, directory.schedule_steps)
    steps = plan.schedule.steps
    step = checkpoint.step if checkpoint else -1
    with (
        directory.transfer(),
        _open_records(plan, directory, step) as records,
        TrainingProgress(console, steps, max(step, 0)) as progress,
        ExitStack() as engines,
    ):
        with progress.phase("building engines"):
            learner = engines.enter_context(open_learner(plan, directory, hosts))
        resumed = checkpoint is not None and directory.owns(checkpoint)
        best = BestModel(
            plan.recipe.keep_best,
            directory.best,
            directory.best_model,
            checkpoint.state.get("best") if checkpoint and resumed else None,
        )
        loop = RunLoop(
            learner=learner,
            schedule=plan.schedule,
            models=plan.recipe.model_directories,
            directory=directory,
            best=best,
            watch=Watch(plan.recipe.stop_on, plan.end_tokens),
            records=records,
            progress=progress,
            signals=signals,
            callbacks=callbacks,
        )
        result = _result(plan, directory, loop, loop.run(checkpoint))
        learner.save_model(directory.model)
        if plan.trains_adapter:
            learner.save_adapter(directory.adapter)
        records.draw("stopped" if result["stopped"] else "complete", result["stopped"] or "")
    directory.finish(result)
    callbacks.run_end(result)
    return result


def open_learner(
    plan: RunPlan, directory: RunDirectory, hosts: Hosts
) -> AbstractContextManager[OnlineLearner | SupervisedLearner]:
    """Start the engines of ``plan`` on ``hosts``; they end with the context."""
    finetune = FinetuneSpec(
        dataset_size=directory.schedule_steps * plan.batch_size, train_batch_size=plan.batch_size
    )
    if plan.rollout is None:
        return open_supervised(plan, directory, finetune, hosts)
    return open_online(plan, directory, finetune, hosts)


def _open_records(plan: RunPlan, directory: RunDirectory, step: int) -> RunRecords:
    """The records of the run, which continue after ``step``."""
    recipe, values = plan.recipe, plan.recipe.model_dump(mode="json")
    roles = {name: (engine.spec.name, describe_ranks(engine)) for name, engine in plan.engines.items()}
    boards = () if recipe.wandb is None else (WandbBoard(recipe.wandb, directory.path, values),)
    page = RunPage(values, directory.path, cluster=str(plan.cluster), roles=roles)
    return RunRecords(directory, step, page, boards)


def _warn_of_ended_schedule(plan: RunPlan, schedule_steps: int) -> None:
    """An extended run keeps the horizon of its schedule, at whose end the rate may be 0."""
    optimizer, steps = plan.schedule.optimizer, plan.schedule.steps
    end = schedule_length(optimizer, schedule_steps)
    if end is not None and optimizer.schedule.function is None and end < steps:
        logger.warning(
            "the learning rate stays at %g from step %d on, where its schedule ends; optimizer.schedule_steps=%d "
            "stretches it over all steps of the run",
            optimizer.lr * optimizer.schedule.min_lr_ratio,
            end,
            steps,
        )


def _result(plan: RunPlan, directory: RunDirectory, loop: RunLoop, step: int) -> dict[str, Any]:
    best, evaluations = loop.best.state_dict(), loop.evaluations
    return {
        "engine": next(iter(plan.trainers.values())).spec.name,
        "seed": plan.recipe.seed,
        "steps": step,
        "stopped": loop.callbacks.stopped if step < plan.schedule.steps else None,
        "before": evaluations.get("0"),
        "after": evaluations[max(evaluations, key=int)],
        "best": best,
        **directory.places(),
        "adapter": str(directory.adapter) if plan.trains_adapter else None,
        "best_model": str(directory.best_model) if best else None,
    }
