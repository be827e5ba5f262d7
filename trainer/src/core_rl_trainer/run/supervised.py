"""Training on data alone: SFT, reward models, DPO. One training step is one update on the next examples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from core_rl.backend.meta import FinetuneSpec
from core_rl.checkpoint.run import RunCheckpoint
from core_rl.data.batch import SequenceBatch
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.launch.group import EngineGroup
from core_rl.launch.hosts import Hosts
from core_rl_trainer.algorithms.fields import BEHAVIOUR, REFERENCE
from core_rl_trainer.algorithms.interface import make_interface
from core_rl_trainer.algorithms.sft import SupervisedInterface
from core_rl_trainer.data.batches import NumberedBatches, demonstration_batch, preference_batch
from core_rl_trainer.data.datasets import SampleDataset
from core_rl_trainer.data.kinds import Sample, images_of
from core_rl_trainer.data.training_data import TrainingData
from core_rl_trainer.logs.samples import SHOWN, Evaluation, ExampleSample, example_samples
from core_rl_trainer.plan.run_plan import RunPlan
from core_rl_trainer.run.engines import micro_batches_of, open_trainers
from core_rl_trainer.run.loop import Learner
from core_rl_trainer.run.run_directory import RunDirectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MODEL = "model"
"""The role of the trained model."""


CHUNK = 64
"""Samples of one forward pass over the data, before it is cut into micro-batches."""

LogProbs = dict[int, Tensor]
"""Log-probs of the samples of a dataset, by their ``index``; float32."""


@contextmanager
def open_supervised(
    plan: RunPlan, directory: RunDirectory, finetune: FinetuneSpec, hosts: Hosts
) -> Iterator[SupervisedLearner]:
    """Open the engine of ``plan``; it is closed on the way out."""
    recipe, interface = plan.recipe, make_interface(plan.algorithm)
    assert isinstance(interface, SupervisedInterface)  # of a plan without rollouts
    drawn = plan.schedule.steps * plan.batch_size
    rows = _drawn_rows(plan.data, recipe.seed, drawn) if REFERENCE in interface.wanted_fields else {}
    with open_trainers(plan.trainers, finetune, recipe.timeouts.call_s, hosts) as groups:
        yield SupervisedLearner(
            interface=interface,
            batches=NumberedBatches(plan.data.train, plan.batch_size, recipe.seed),
            tokenizer_path=recipe.model.path,
            engine=groups[MODEL],
            data=plan.data,
            rows=rows,
            mb_spec=micro_batches_of([groups[MODEL]], recipe.micro_batch_tokens, recipe.share_prefixes),
            directory=directory,
            tokenizer=plan.tokenizer,
        )


@dataclass(frozen=True, kw_only=True)
class SupervisedLearner(Learner):
    """Training on data alone."""

    phases = ("data", None, None)

    interface: SupervisedInterface[Any]
    engine: EngineGroup
    data: TrainingData
    rows: dict[str, list[int]]
    """Samples of the training data (``train``) and the evaluation data (``eval``) whose reference log-probs count."""
    mb_spec: MicroBatchSpec
    directory: RunDirectory
    tokenizer: PreTrainedTokenizerBase
    references: dict[str, LogProbs] = field(default_factory=dict)
    """The reference's log-probs of ``rows``."""

    @property
    def start_phase(self) -> str:
        return "log-probs of the reference" if self.rows else "first step"

    def start(self) -> None:
        """Compute the reference's log-probs, with the initial weights, and keep them on the disk."""
        for name, rows in self.rows.items():
            values = self.references.setdefault(name, {})
            missing = [row for row in rows if row not in values]
            if missing:
                held_out = {} if self.data.held_out is None else {"eval": self.data.held_out}
                values |= self._reference_logprobs(({"train": self.data.train} | held_out)[name], missing)
                path = self.directory.reference(name)
                temporary = path.with_suffix(".tmp")
                save_file({str(row): value for row, value in values.items()}, temporary)
                temporary.replace(path)

    def batch(self, step: int) -> SequenceBatch:
        return self._batch("train", next(self.batches))

    def update(self, batch: SequenceBatch, step: int) -> dict[str, float]:
        metrics = self.interface.train_step(self.engine, batch, self.mb_spec)
        self.engine.lr_scheduler_step()
        return metrics

    def evaluate(self) -> Evaluation:
        """The loss and its metrics over the evaluation data, and some examples; else examples of the training data."""
        held_out = self.data.held_out
        if held_out is None:
            samples = self._samples("train", self.data.train)
            return Evaluation(metrics={}, samples=samples)
        batch = self._batch("eval", [held_out[index] for index in range(len(held_out))])
        metrics = self.interface.evaluate(self.engine, batch, self.mb_spec)
        return Evaluation(
            metrics={f"eval_{name}": value for name, value in metrics.items()},
            samples=self._samples("eval", held_out),
        )

    def model(self) -> AbstractContextManager[EngineGroup]:
        return nullcontext(self.engine)

    def trained(self) -> dict[str, EngineGroup]:
        return {MODEL: self.engine}

    def restore(self, checkpoint: RunCheckpoint) -> None:
        for name in self.rows:
            if (path := self.directory.reference(name)).is_file():
                self.references[name] = {int(row): value for row, value in load_file(path).items()}
        self.start()  # of rows that more steps draw, or of another run: the engine still has the initial weights
        super().restore(checkpoint)

    def _reference_logprobs(self, dataset: SampleDataset, rows: Sequence[int]) -> LogProbs:
        """The log-probs of ``rows`` of ``dataset`` with the present weights."""
        values: LogProbs = {}
        for first in range(0, len(rows), CHUNK):
            numbers = rows[first : first + CHUNK]
            chunk = [dataset[row] for row in numbers]
            batch = self._make_batch(chunk)
            logprobs = self.interface.inference(self.engine, batch, self.mb_spec)[BEHAVIOUR].float()
            lengths = [self._make_batch([sample]).num_tokens for sample in chunk]
            pieces = zip(numbers, logprobs.split(lengths), strict=True)
            values |= {row: piece.clone() for row, piece in pieces}
        return values

    def _make_batch(self, samples: Sequence[Sample]) -> SequenceBatch:
        return preference_batch(samples) if self.data.kind.paired else demonstration_batch(samples)

    def _batch(self, name: str, samples: Sequence[Sample]) -> SequenceBatch:
        """``samples`` of the dataset ``name``, with ``ref_logprobs [T]`` where the algorithm needs them."""
        batch = self._make_batch(samples)
        if not self.references:
            return batch
        logprobs = [self.references[name][sample["index"]] for sample in samples]
        return batch.with_tokens(**{REFERENCE: torch.cat(logprobs)})

    def _samples(self, name: str, dataset: SampleDataset) -> tuple[ExampleSample, ...]:
        """The first examples of ``dataset`` as text, each with the metrics of the present weights."""
        samples = list[ExampleSample]()
        for index in range(min(SHOWN, len(dataset))):
            sample = dataset[index]
            batch = self._batch(name, [sample])
            metrics = self.interface.evaluate(self.engine, batch, self.mb_spec)
            titles = ("chosen", "rejected") if self.data.kind.paired else ("example",) * len(batch.lengths)
            images = images_of(sample)
            samples += example_samples(batch, titles, self.tokenizer, metrics, images)
        return tuple(samples)


def _drawn_rows(data: TrainingData, seed: int, count: int) -> dict[str, list[int]]:
    """The first ``count`` samples in the order of ``seed``, and the samples of evaluations and of the page."""
    order = data.train.order(seed)
    drawn = {next(order) for _ in range(count)}
    if data.held_out is None:
        return {"train": sorted(drawn.union(range(min(SHOWN, len(data.train)))))}
    return {"train": sorted(drawn), "eval": list(range(len(data.held_out)))}
