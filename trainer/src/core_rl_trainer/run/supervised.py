"""Training on data alone: SFT, reward models, DPO. One training step is one update on the next examples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core_rl.backend.meta import FinetuneSpec
from core_rl.checkpoint.run import RunCheckpoint
from core_rl.data.batch import SequenceBatch
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.launch.group import EngineGroup
from core_rl.launch.hosts import Hosts
from core_rl_trainer.algorithms.fields import REFERENCE
from core_rl_trainer.algorithms.interface import make_interface
from core_rl_trainer.algorithms.sft import SupervisedInterface
from core_rl_trainer.data.batches import (
    MakeBatch,
    NumberedBatches,
    demonstration_batch,
    preference_batch,
)
from core_rl_trainer.data.kinds import Sample
from core_rl_trainer.data.training_data import TrainingData
from core_rl_trainer.logs.samples import SHOWN, Evaluation, ExampleSample, example_samples
from core_rl_trainer.plan.run_plan import RunPlan
from core_rl_trainer.run.engines import open_trainers
from core_rl_trainer.run.loop import Phases
from core_rl_trainer.run.parts import restore_parts
from core_rl_trainer.run.reference_cache import ReferenceCache
from core_rl_trainer.run.run_directory import RunDirectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["SupervisedLearner", "open_supervised"]

MODEL = "model"
"""The role of the trained model."""


@contextmanager
def open_supervised(
    plan: RunPlan, directory: RunDirectory, finetune: FinetuneSpec, hosts: Hosts
) -> Iterator[SupervisedLearner]:
    """Open the engine of ``plan``; it is closed on the way out."""
    interface = make_interface(plan.algorithm)
    assert isinstance(interface, SupervisedInterface)  # of a plan without rollouts
    with open_trainers(plan.trainers, finetune, plan.limits.call_s, hosts) as groups:
        yield SupervisedLearner(
            interface,
            groups[MODEL],
            plan.data,
            NumberedBatches(plan.data.train, plan.batch_size, plan.seed),
            MicroBatchSpec(max_tokens=plan.micro_batch_tokens),
            directory,
            plan.tokenizer,
            plan.models["model.path"],
        )


class SupervisedLearner:
    """The engine, the algorithm and the data of a run. The version of the weights is the number of steps."""

    def __init__(
        self,
        interface: SupervisedInterface[Any],
        engine: EngineGroup,
        data: TrainingData,
        batches: NumberedBatches,
        mb_spec: MicroBatchSpec,
        directory: RunDirectory,
        tokenizer: PreTrainedTokenizerBase,
        tokenizer_path: str,
    ) -> None:
        self._tokenizer = tokenizer
        self._tokenizer_path = tokenizer_path
        self._interface = interface
        with_reference = REFERENCE in interface.wanted_fields
        start = "log-probs of the reference" if with_reference else "first step"
        self.phases = Phases(start=start, batch="data")
        self._engine = engine
        self._datasets = {"train": data.train} | ({} if data.held_out is None else {"eval": data.held_out})
        self._directory = directory
        self._mb_spec = mb_spec
        self._data = batches
        paired = interface.trains_on == "preferences"
        self._make_batch: MakeBatch = preference_batch if paired else demonstration_batch
        self._paired = paired
        sampled = "eval" if data.held_out is not None else "train"
        self._sampled = None if sampled == "train" and data.streamed else sampled
        self._references: dict[str, ReferenceCache] = {}

    def start(self) -> None:
        """Prepare the first step: compute the reference's log-probs, with the initial weights."""
        if REFERENCE not in self._interface.wanted_fields:
            return
        for name, dataset in self._datasets.items():
            cache = ReferenceCache.compute(
                self._interface, self._engine, dataset, self._make_batch, self._mb_spec
            )
            cache.save(self._directory.reference(name))
            self._references[name] = cache

    def batch(self, step: int) -> SequenceBatch:
        """The next examples."""
        return self._batch("train", next(self._data))

    def training(self) -> AbstractContextManager[None]:
        """The engine always has its devices."""
        return nullcontext()

    def score(self, batch: SequenceBatch, step: int) -> tuple[SequenceBatch, dict[str, float]]:
        """``batch`` unchanged: it has the reference's log-probs, and nothing else is scored."""
        return batch, {}

    def update(self, batch: SequenceBatch, step: int) -> dict[str, float]:
        """One update; its metrics. The weights have version ``step`` afterwards."""
        metrics = self._interface.train_step(self._engine, batch, self._mb_spec)
        self._engine.lr_scheduler_step()
        self._engine.set_version(step)
        return metrics

    def sync(self, version: int) -> None:
        """No other engine has the weights."""

    def _batch(self, name: str, samples: Sequence[Sample]) -> SequenceBatch:
        batch = self._make_batch(samples)
        return self._references[name].add_to(batch, samples) if self._references else batch

    def evaluate(self) -> Evaluation:
        """The loss and its metrics over the evaluation data, and some examples; else examples of the training data."""
        held_out = self._datasets.get("eval")
        if held_out is None:
            return Evaluation(metrics={}, samples=self._samples())
        samples = [held_out[index] for index in range(len(held_out))]
        metrics = self._interface.evaluate(self._engine, self._batch("eval", samples), self._mb_spec)
        return Evaluation(
            metrics={f"eval_{name}": value for name, value in metrics.items()}, samples=self._samples()
        )

    def _samples(self) -> tuple[ExampleSample, ...]:
        """The first examples as text, each with the metrics of the present weights; none of streamed data."""
        if self._sampled is None:
            return ()
        dataset, samples = self._datasets[self._sampled], list[ExampleSample]()
        for index in range(min(SHOWN, len(dataset))):
            batch = self._batch(self._sampled, [dataset[index]])
            metrics = self._interface.evaluate(self._engine, batch, self._mb_spec)
            titles = ("chosen", "rejected") if self._paired else ("example",) * len(batch.lengths)
            samples += example_samples(batch, titles, self._tokenizer, metrics)
        return tuple(samples)

    def save_model(self, path: Path) -> None:
        """The model in Hugging Face format, with its tokenizer."""
        self._interface.save(self._engine, str(path), tokenizer_path=self._tokenizer_path)

    def save_adapter(self, path: Path) -> None:
        """The adapter that is trained, with the tokenizer."""
        self._interface.save_adapter(self._engine, str(path), tokenizer_path=self._tokenizer_path)

    # ----------------------------------------------------------------- state

    def trained(self) -> dict[str, EngineGroup]:
        """The group whose state a checkpoint holds."""
        return {MODEL: self._engine}

    def state_dict(self) -> dict[str, Any]:
        """The position in the data order, as JSON."""
        return {"data": self._data.state_dict()}

    def restore(self, checkpoint: RunCheckpoint) -> None:
        """Resume from ``checkpoint``. Raises `CheckpointMismatch` when its parts do not belong together."""
        self._read_references()
        restore_parts({MODEL: self._engine}, checkpoint)
        self._data.load_state_dict(checkpoint.state["data"])

    def _read_references(self) -> None:
        """The reference's log-probs from the disk; a run that starts from another one's checkpoint computes them."""
        if REFERENCE not in self._interface.wanted_fields:
            return
        places = {name: self._directory.reference(name) for name in self._datasets}
        if not all(place.is_file() for place in places.values()):
            self.start()  # with the initial weights, which the engine still has
            return
        self._references = {name: ReferenceCache.load(place) for name, place in places.items()}
