"""The steps of a run: training, evaluations, records and checkpoints, and an early end."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from core_rl.checkpoint.run import RunCheckpoint
from core_rl_trainer.errors import NothingLearned
from core_rl_trainer.logs.progress import TrainingProgress, say
from core_rl_trainer.logs.records import RunRecords
from core_rl_trainer.plan.run_plan import Loop
from core_rl_trainer.recipe.recipe import Recipe
from core_rl_trainer.run.bad_weights import require_finite_weights, weights_are_blamed
from core_rl_trainer.run.best_model import BestModel
from core_rl_trainer.run.callbacks import Callbacks
from core_rl_trainer.run.run_directory import RunDirectory
from core_rl_trainer.run.saving import RunSaver
from core_rl_trainer.run.signals import StopSignals
from core_rl_trainer.run.watch import Watch

__all__ = ["RunSteps"]


@dataclass(kw_only=True)
class RunSteps:
    """The steps of a run, with all records of them."""

    recipe: Recipe
    directory: RunDirectory
    loop: Loop
    records: RunRecords
    progress: TrainingProgress
    signals: StopSignals
    callbacks: Callbacks
    end_tokens: Mapping[int, str]
    evaluations: dict[str, dict[str, float]] = field(default_factory=dict)
    """Step, as text since JSON has no other keys, to the metrics of its evaluation."""
    _saver: RunSaver = field(init=False)

    def run(self, checkpoint: RunCheckpoint | None) -> dict[str, Any]:
        """Train to the last step, or to the one after which a callback stops the run; the result as plain values.

        Raises `StoppedBySignal` and `NothingLearned` after the step that ends the run early.
        """
        recipe, directory = self.recipe, self.directory
        done = checkpoint.step if checkpoint else 0
        own = checkpoint is not None and directory.owns(checkpoint)
        best = BestModel(
            recipe.keep_best,
            directory.best,
            directory.best_model,
            checkpoint.state.get("best") if checkpoint and own else None,
        )
        self.records.best = best.state_dict()
        watch = Watch(recipe.stop_on, self.end_tokens)
        self._saver = RunSaver(directory.checkpoints, self.loop.wait_for_parts, partial(self._saved, best))
        with self._saver.completed():
            self._begin(checkpoint, best)
            self.progress.begin_steps()
            with self.signals.during_steps():
                while done < recipe.steps and self.callbacks.stopped is None:
                    done += 1
                    self._step(done, best, watch)
                self._complete(checkpoint, best)
        return self._result(done, best)

    def _begin(self, checkpoint: RunCheckpoint | None, best: BestModel) -> None:
        progress = self.progress
        if checkpoint is not None:
            place = checkpoint.path.parents[1]
            say(progress.console, f"resuming from the checkpoint of step {checkpoint.step} in {place}")
            with progress.phase("loading the checkpoint"):
                self.loop.restore(checkpoint)
            self.evaluations = dict(checkpoint.state["evaluations"])
            self.callbacks.step = checkpoint.step
        else:
            with weights_are_blamed(self.recipe):
                with progress.phase(self.loop.start_phase):
                    self.loop.start()
                with progress.phase("first evaluation"):
                    metrics = self._evaluate(0, best)
            require_finite_weights(self.recipe, metrics)
            self.records.write(0, metrics)
            self.callbacks.evaluation_end(0, metrics)
            if self.callbacks.stopped is not None:
                self._save(0, best)
        self.records.draw()

    def _step(self, step: int, best: BestModel, watch: Watch) -> None:
        """One step with its evaluation, its records and its checkpoint, as far as they are due."""
        recipe, records = self.recipe, self.records
        with weights_are_blamed(recipe) if step == 1 else nullcontext():
            metrics = self.loop.step(step)
        self._saver.finish_if_written()
        self.progress.show(step, metrics)
        last = step == recipe.steps
        evaluated = last or _is_due(step, recipe.eval_every)
        evaluation = self._evaluate(step, best) if evaluated else {}
        records.write(step, metrics | evaluation)
        if step == 1:
            require_finite_weights(recipe, metrics | evaluation)
        self.callbacks.step_end(step, metrics)
        if evaluated:
            self.callbacks.evaluation_end(step, evaluation)
        verdict = watch.see(step, metrics)
        due = last or _is_due(step, recipe.save_every) or _is_due(step, recipe.save_portable_every)
        wanted = due or verdict is not None or self.signals.noted or self.callbacks.stopped is not None
        saved = wanted and (verdict is None or verdict.weights_are_good)
        if saved:
            self._save(step, best)
        elif evaluated:
            records.draw()
        if verdict is not None:
            self._saver.finish()
            raise NothingLearned(f"{verdict.reason}. {self._last_checkpoint()}")
        if saved and self.signals.noted:  # one that came after the choice above waits for the next step
            self._saver.finish()
            self.signals.raise_stopped(step)

    def _last_checkpoint(self) -> str:
        steps = self.directory.checkpoints.steps()
        if not steps:
            return "There is no checkpoint yet"
        return f"The last good checkpoint is that of step {steps[-1]}, from which the same command goes on"

    def _complete(self, checkpoint: RunCheckpoint | None, best: BestModel) -> None:
        """Add what the last checkpoint lacks, where ``steps`` or ``save_portable_every`` was changed to end with it."""
        step = self.recipe.steps
        if checkpoint is None or checkpoint.step != step:
            return
        evaluated = str(step) in self.evaluations
        if not evaluated:
            metrics = self._evaluate(step, best)
            self.records.write(step, metrics)
            self.callbacks.evaluation_end(step, metrics)
        if not evaluated or self.recipe.save_portable_every:
            self._save(step, best)

    def _evaluate(self, step: int, best: BestModel) -> dict[str, float]:
        self._saver.finish()  # its best model is still there
        found = self.loop.evaluate()
        self.records.add_samples(step, found.samples)
        self.evaluations[str(step)] = found.metrics
        best.offer(step, found.metrics, self.loop.save_model)
        self.records.best = best.state_dict()
        return found.metrics

    def _save(self, step: int, best: BestModel) -> None:
        recipe = self.recipe
        self.records.sync()
        state = self.loop.state_dict() | {
            "evaluations": self.evaluations,
            "best": best.state_dict(),
            "run": self.directory.identity.to_dict(),
        }
        last = step == recipe.steps and recipe.save_portable_every > 0
        portable = last or _is_due(step, recipe.save_portable_every)
        parts = self.loop.parts(portable=portable, background=recipe.save_in_background)
        self._saver.begin(step, parts, state)
        self.records.draw()

    def _saved(self, best: BestModel, step: int, path: Path) -> None:
        best.prune()
        self.directory.copy_checkpoint(step)
        self.callbacks.checkpoint_saved(step, path)

    def _result(self, step: int, best: BestModel) -> dict[str, Any]:
        """The result of a run that ends after ``step``."""
        recipe, directory = self.recipe, self.directory
        return {
            "engine": recipe.engine,
            "seed": recipe.seed,
            "steps": step,
            "stopped": self.callbacks.stopped if step < recipe.steps else None,
            "before": self.evaluations["0"],
            "after": self.evaluations[max(self.evaluations, key=int)],
            "best": best.state_dict(),
            **directory.places(),
            "adapter": str(directory.adapter) if recipe.model.lora is not None else None,
            "best_model": str(directory.best_model) if best.state_dict() else None,
        }


def _is_due(step: int, every: int) -> bool:
    """Whether ``step`` is one of every so many; 0 is never."""
    return every > 0 and step % every == 0
