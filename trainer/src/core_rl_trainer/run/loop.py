"""The loop of a run: rollout, score, update, sync, evaluate, save; the same for rollouts and for data."""

from __future__ import annotations

import math
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch

from core_rl.checkpoint.run import RunCheckpoint
from core_rl.checkpoint.tensor_files import TensorFiles
from core_rl.data.batch import SequenceBatch
from core_rl.errors import CheckpointError, ConfigError, CoreRLError, RunStopped, WeightsError, raise_all
from core_rl.launch.group import EngineGroup
from core_rl_trainer.algorithms.interface import ModelInterface
from core_rl_trainer.data.batches import NumberedBatches
from core_rl_trainer.errors import NothingLearned
from core_rl_trainer.logs.progress import TrainingProgress, print_line
from core_rl_trainer.logs.samples import Evaluation
from core_rl_trainer.plan.run_plan import Schedule
from core_rl_trainer.run.best_model import BestModel
from core_rl_trainer.run.callbacks import Callbacks
from core_rl_trainer.run.records import RunRecords
from core_rl_trainer.run.run_directory import RunDirectory
from core_rl_trainer.run.saving import RunSaver, part_writers, restore_parts
from core_rl_trainer.run.signals import StopSignals
from core_rl_trainer.run.watch import Watch

SIGNS = re.compile(r"\b(nan|inf|infinite|finite|probability)\b", re.IGNORECASE)
"""Words of an error that weights which are not finite may have caused."""
SHOWN = 3
"""Tensors that an error names."""


@contextmanager
def weights_are_blamed(models: Mapping[str, str]) -> Iterator[None]:
    """Errors inside that speak of NaN become a `WeightsError`, where files of ``models`` have some.

    ``models`` are directories by their fields.

    Reading all weights takes a while: it is done only then.
    """
    try:
        yield
    except (ConfigError, RunStopped):
        raise
    except (CoreRLError, RuntimeError) as error:
        if SIGNS.search(str(error)):
            _raise_if_bad(models, error)
        raise


def require_finite_weights(models: Mapping[str, str], metrics: Mapping[str, float]) -> None:
    """Raise `WeightsError` for NaN in first ``metrics`` that comes from the model's files."""
    if not all(math.isfinite(value) for value in metrics.values()):
        _raise_if_bad(models, None)


def _raise_if_bad(models: Mapping[str, str], cause: Exception | None) -> None:
    problems = [text for field, path in models.items() for text in _bad(field, Path(path))]
    try:
        raise_all(WeightsError, "the weights that the run starts from are not finite", problems)
    except WeightsError as error:
        raise error from cause


def _bad(field: str, directory: Path) -> Iterator[str]:
    by_file: dict[str, list[str]] = {}
    try:
        files = TensorFiles(directory, "model")
        for name in files.names():
            tensor = files.read(name)
            wrong = int((~torch.isfinite(tensor)).sum()) if tensor.is_floating_point() else 0
            if wrong:
                by_file.setdefault(files.file_of(name), []).append(
                    f"{name} ({wrong:,} of {tensor.numel():,} values)"
                )
    except CheckpointError:
        return  # files that cannot be read are an error of their own
    for file, tensors in by_file.items():
        more = f" and {len(tensors) - SHOWN} more" if len(tensors) > SHOWN else ""
        shown = ", ".join(tensors[:SHOWN])
        yield (
            f"{field}: {directory / file} has NaN or infinity in {shown}{more}; replace the file, for example by "
            "a new download or an earlier checkpoint"
        )


@dataclass(frozen=True, kw_only=True)
class Learner(ABC):
    """Engines, algorithm and data of a run, for `RunLoop`. The version of the weights is the number of steps.

    Everything random is a function of the seed and of positions in the data order.
    """

    phases: ClassVar[tuple[str, str | None, str | None]]
    """Names of `batch`, `score` and `sync`; the metric of a phase is ``time_NAME_s``. None is not measured."""

    interface: ModelInterface[Any]
    batches: NumberedBatches
    tokenizer_path: str

    @property
    @abstractmethod
    def start_phase(self) -> str:
        """The name of `start` for the progress."""

    @abstractmethod
    def start(self) -> None:
        """Prepare the first step."""

    @abstractmethod
    def batch(self, step: int) -> SequenceBatch:
        """The sequences of ``step``."""

    def training(self) -> AbstractContextManager[None]:
        """Inside the context the train engines have the devices."""
        return nullcontext()

    def score(self, batch: SequenceBatch, step: int) -> tuple[SequenceBatch, dict[str, float]]:
        """``batch`` with the fields that the algorithm wants, and metrics."""
        return batch, {}

    @abstractmethod
    def update(self, batch: SequenceBatch, step: int) -> dict[str, float]:
        """The updates of ``step``; their metrics."""

    def sync(self, version: int) -> None:
        """Give the trained weights their ``version``, and send them to a rollout engine."""
        for group in self.trained().values():
            group.set_version(version)

    @abstractmethod
    def evaluate(self) -> Evaluation:
        """Evaluate on the evaluation data."""

    @abstractmethod
    def model(self) -> AbstractContextManager[EngineGroup]:
        """The engine of the trained model, with its devices inside the context."""

    @abstractmethod
    def trained(self) -> dict[str, EngineGroup]:
        """The groups whose state a checkpoint holds, by role."""

    def save_model(self, path: Path) -> None:
        """Write the model in Hugging Face format, with its tokenizer."""
        with self.model() as engine:
            self.interface.save(engine, str(path), tokenizer_path=self.tokenizer_path)

    def save_adapter(self, path: Path) -> None:
        """Write the trained adapter in the layout of ``peft``, with the tokenizer."""
        with self.model() as engine:
            self.interface.save_adapter(engine, str(path), tokenizer_path=self.tokenizer_path)

    def state_dict(self) -> dict[str, Any]:
        """The rest of a run checkpoint, as JSON: the position in the data order."""
        return {"data": self.batches.state_dict()}

    def restore(self, checkpoint: RunCheckpoint) -> None:
        """Resume from ``checkpoint``. Raises `CheckpointMismatch` when its parts do not belong together."""
        restore_parts(self.trained(), checkpoint)
        self.batches.load_state_dict(checkpoint.state["data"])


@dataclass(kw_only=True)
class RunLoop:
    """The training steps of a run, with their evaluations, records and checkpoints."""

    learner: Learner
    schedule: Schedule
    models: Mapping[str, str]
    """Directories of the initial weights, by field."""
    directory: RunDirectory
    best: BestModel
    watch: Watch
    records: RunRecords
    progress: TrainingProgress
    signals: StopSignals
    callbacks: Callbacks
    evaluations: dict[str, dict[str, float]] = field(default_factory=dict)
    """Step, as text since JSON has no other keys, to the metrics of its evaluation."""
    _saver: RunSaver = field(init=False)

    def run(self, checkpoint: RunCheckpoint | None) -> int:
        """Train to the last step, or until a callback stops the run; returns the last step done.

        Raises `StoppedBySignal` and `NothingLearned` after the step that ends the run early.
        """
        step = checkpoint.step if checkpoint else 0
        self.records.best = self.best.state_dict()
        self._saver = RunSaver(self.directory.checkpoints, self._wait_for_parts, self._saved)
        with self._saver.completed():
            self._begin(checkpoint)
            self.progress.begin_steps()
            with self.signals.during_steps():
                while step < self.schedule.steps and self.callbacks.stopped is None:
                    step += 1
                    self._step(step)
                self._complete(checkpoint)
        return step

    def _begin(self, checkpoint: RunCheckpoint | None) -> None:
        progress = self.progress
        if checkpoint is not None:
            place = checkpoint.path.parents[1]
            print_line(progress.console, f"resuming from the checkpoint of step {checkpoint.step} in {place}")
            with progress.phase("loading the checkpoint"):
                self.learner.restore(checkpoint)
            self.evaluations = dict(checkpoint.state["evaluations"])
            self.callbacks.step = checkpoint.step
        else:
            with weights_are_blamed(self.models):
                with progress.phase(self.learner.start_phase):
                    self.learner.start()
                if self.schedule.evaluates_first:
                    with progress.phase("first evaluation"):
                        metrics = self._evaluate(0)
                    require_finite_weights(self.models, metrics)
                    self.records.write(0, metrics)
                    self.callbacks.evaluation_end(0, metrics)
            if self.callbacks.stopped is not None:
                self._save(0)
        self.records.draw()

    def _step(self, step: int) -> None:
        """Train ``step``; evaluate, record and save where that is due."""
        schedule, records = self.schedule, self.records
        with weights_are_blamed(self.models) if step == 1 else nullcontext():
            metrics = self._train(step)
        self._saver.finish_if_written()
        self.progress.show(step, metrics)
        last = step == schedule.steps
        evaluated = last or _is_due(step, schedule.eval_every)
        evaluation = self._evaluate(step) if evaluated else {}
        records.write(step, metrics | evaluation)
        if step == 1:
            require_finite_weights(self.models, metrics | evaluation)
        self.callbacks.step_end(step, metrics)
        if evaluated:
            self.callbacks.evaluation_end(step, evaluation)
        verdict = self.watch.see(step, metrics)
        due = last or _is_due(step, schedule.save_every) or _is_due(step, schedule.save_portable_every)
        ends = verdict is not None or self.signals.noted or self.callbacks.stopped is not None
        saved = (due or ends) and (verdict is None or verdict.weights_are_good)
        if saved:
            self._save(step)
        elif evaluated:
            records.draw()
        if verdict is not None:
            self._saver.finish()
            raise NothingLearned(f"{verdict.reason}. {self._last_checkpoint()}")
        if saved and self.signals.noted:  # a signal after the decision above waits for the next step
            self._saver.finish()
            self.signals.raise_stopped(step)

    def _train(self, step: int) -> dict[str, float]:
        """Rollout, score, update and sync of ``step``; its metrics. All weights have version ``step`` afterwards."""
        learner, start, seconds = self.learner, time.perf_counter(), dict[str, float]()
        batch_phase, score_phase, sync_phase = learner.phases
        with _measured(seconds, batch_phase):
            batch = learner.batch(step)
        with learner.training():
            with _measured(seconds, score_phase):
                complete, metrics = learner.score(batch, step)
            with _measured(seconds, "update"):
                metrics |= learner.update(complete, step)
        with _measured(seconds, sync_phase):
            learner.sync(step)
        speed = {"tokens_per_s": batch.num_tokens / (time.perf_counter() - start)}
        return metrics | speed | seconds | {"version": float(step)}

    def _last_checkpoint(self) -> str:
        steps = self.directory.checkpoints.steps()
        if not steps:
            return "There is no checkpoint yet"
        return f"The last good checkpoint is that of step {steps[-1]}, from which the same command goes on"

    def _complete(self, checkpoint: RunCheckpoint | None) -> None:
        """Complete the last checkpoint, where ``steps`` or ``save_portable_every`` was changed to end with it."""
        step = self.schedule.steps
        if checkpoint is None or checkpoint.step != step:
            return
        evaluated = str(step) in self.evaluations
        if not evaluated:
            metrics = self._evaluate(step)
            self.records.write(step, metrics)
            self.callbacks.evaluation_end(step, metrics)
        if not evaluated or self.schedule.save_portable_every:
            self._save(step)

    def _evaluate(self, step: int) -> dict[str, float]:
        self._saver.finish()  # its best model is still there
        evaluation = self.learner.evaluate()
        self.records.add_samples(step, evaluation.samples)
        self.evaluations[str(step)] = evaluation.metrics
        self.best.offer(step, evaluation.metrics, self.learner.save_model)
        self.records.best = self.best.state_dict()
        return evaluation.metrics

    def _save(self, step: int) -> None:
        schedule = self.schedule
        self.records.sync()
        state = self.learner.state_dict() | {
            "evaluations": self.evaluations,
            "best": self.best.state_dict(),
            "run": asdict(self.directory.identity),
        }
        last = step == schedule.steps and schedule.save_portable_every > 0
        portable = last or _is_due(step, schedule.save_portable_every)
        groups, background = self.learner.trained(), schedule.save_in_background
        self._saver.begin(step, part_writers(groups, portable=portable, background=background), state)
        self.records.draw()

    def _wait_for_parts(self) -> None:
        for group in self.learner.trained().values():
            group.wait_for_saves()

    def _saved(self, step: int, path: Path) -> None:
        self.best.prune()
        self.directory.copy_checkpoint(step)
        self.callbacks.checkpoint_saved(step, path)


@contextmanager
def _measured(seconds: dict[str, float], phase: str | None) -> Iterator[None]:
    """Add the wall-clock ``seconds`` of a ``phase``; None is not measured."""
    start = time.perf_counter()
    yield
    if phase is not None:
        seconds[f"time_{phase}_s"] = time.perf_counter() - start


def _is_due(step: int, every: int) -> bool:
    """Whether ``step`` is a multiple of ``every``; 0 is never."""
    return every > 0 and step % every == 0
