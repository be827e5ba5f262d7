"""Training on data alone: SFT, reward models, DPO. One training step is one update on the next examples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core_rl.backend.meta import FinetuneSpec
from core_rl.checkpoint.run import RunCheckpoint
from core_rl.data.batch import SequenceBatch
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.errors import ConfigError, raise_all
from core_rl.launch.group import EngineGroup
from core_rl.launch.hosts import Hosts
from core_rl_trainer.algorithms.fields import REFERENCE
from core_rl_trainer.algorithms.sft import SupervisedInterface
from core_rl_trainer.data.batches import (
    MakeBatch,
    NumberedBatches,
    demonstration_batch,
    preference_batch,
    prompt_loader,
)
from core_rl_trainer.data.end_tokens import require_end_tokens
from core_rl_trainer.data.kinds import DEMONSTRATIONS, PREFERENCES, Sample
from core_rl_trainer.data.statistics import describe_data
from core_rl_trainer.data.tokenizers import (
    context_length,
    load_tokenizer,
    vocabulary_size,
)
from core_rl_trainer.data.training_data import TrainingData, load_training_data
from core_rl_trainer.logs.samples import SHOWN, Evaluation, ExampleSample, example_samples
from core_rl_trainer.plan.engines import TrainPlan, plan_trained
from core_rl_trainer.plan.run_plan import Placement, PreparedRun, Workload
from core_rl_trainer.plan.template_time import with_template_time
from core_rl_trainer.recipe.placement import place_ranks, placement_problems
from core_rl_trainer.recipe.recipe import Recipe
from core_rl_trainer.run.loop import Clock
from core_rl_trainer.run.parts import part_writers, restore_parts
from core_rl_trainer.run.reference_cache import ReferenceCache
from core_rl_trainer.run.restarts import check_layouts
from core_rl_trainer.run.run_directory import RunDirectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["SupervisedLoop", "plan_supervised", "prepare_supervised", "trained_head"]

MODEL = "model"


def prepare_supervised(recipe: Recipe, interface: SupervisedInterface[Any]) -> PreparedRun:
    """All checks and the data."""
    if recipe.data.streaming and REFERENCE in interface.wanted_fields:
        raise ConfigError(
            f"data.streaming = true: the interface {recipe.algorithm.type_!r} keeps the reference's log-probs of all "
            "examples in memory; leave streaming out"
        )
    refused = [name for name in ("critic", "reward_model") if getattr(recipe, name) is not None]
    if refused:
        raise ConfigError(
            f"the interface {recipe.algorithm.type_!r} trains on data and has no use for {refused[0]!r}; remove it"
        )
    plan = plan_supervised(recipe, interface)
    check_layouts(recipe, lambda fewer: {MODEL: plan_supervised(fewer, interface)})
    path = recipe.model.path
    tokenizer, limit = load_tokenizer(path), context_length(path)
    ends = require_end_tokens(tokenizer)
    kind = DEMONSTRATIONS if interface.trains_on == "demonstrations" else PREFERENCES
    recipe = with_template_time(recipe, tokenizer)
    size, budget = recipe.data.batch_size, recipe.micro_batch_tokens
    vocabulary = vocabulary_size(path)
    data = load_training_data(
        recipe.data, kind, tokenizer, recipe.seed, limit=limit, budget=budget, vocabulary=vocabulary
    )
    recipe = recipe.with_steps(len(data.train), size)

    @contextmanager
    def opened(directory: RunDirectory, hosts: Hosts) -> Iterator[SupervisedLoop]:
        finetune = FinetuneSpec(dataset_size=directory.schedule_steps * size, train_batch_size=size)
        with EngineGroup(*plan, ft_spec=finetune, timeout_s=recipe.timeouts.call_s, hosts=hosts) as group:
            yield SupervisedLoop(recipe, interface, group, data, directory, tokenizer)

    workload = Workload(
        examples=len(data.train),
        held_out=len(data.held_out) if data.held_out is not None else 0,
        examples_per_step=size,
        sequences_per_example=2 if kind.paired else data.train.most_sequences,
        longest=data.train.longest,
        largest_unit=max(part.largest_unit for part in (data.train, data.held_out) if part is not None),
    )
    statistics = describe_data(
        data, tokenizer, seed=recipe.seed, batch_size=size, ranks=plan[1].layout.dp, budget=budget
    )
    placement = Placement(slots=place_ranks(plan[1].layout.world_size, None, recipe.cluster))
    return PreparedRun(
        recipe=recipe,
        roles={MODEL: plan},
        placements={MODEL: placement},
        workload=workload,
        data=statistics,
        end_tokens=ends,
        open=opened,
    )


def plan_supervised(recipe: Recipe, interface: SupervisedInterface[Any]) -> TrainPlan:
    """Spec and config of the model; raises `ConfigError` where its ranks do not fit on the machines."""
    plan = plan_trained(recipe, trained_head(interface))
    ranks = plan[1].layout.world_size
    raise_all(ConfigError, "cluster", placement_problems(ranks, None, recipe.cluster))
    return plan


def trained_head(interface: SupervisedInterface[Any]) -> str:
    """The head of the model that is trained: the one whose outputs the loss takes."""
    return "reward" if "scores" in interface.loss().outputs else "lm"


class SupervisedLoop:
    """The engine, the algorithm and the data of a run. The version of the weights is the number of steps."""

    def __init__(
        self,
        recipe: Recipe,
        interface: SupervisedInterface[Any],
        engine: EngineGroup,
        data: TrainingData,
        directory: RunDirectory,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self._tokenizer = tokenizer
        self._tokenizer_path = recipe.model.path
        self._interface = interface
        with_reference = REFERENCE in interface.wanted_fields
        self.start_phase = "log-probs of the reference" if with_reference else "first step"
        self._engine = engine
        self._datasets = {"train": data.train} | ({} if data.held_out is None else {"eval": data.held_out})
        self._directory = directory
        self._mb_spec = MicroBatchSpec(max_tokens=recipe.micro_batch_tokens)
        self._data = NumberedBatches(prompt_loader(data.train, recipe.data.batch_size, recipe.seed))
        paired = interface.trains_on == "preferences"
        self._make_batch: MakeBatch = preference_batch if paired else demonstration_batch
        self._paired = paired
        shown = "eval" if data.held_out is not None else "train"
        self._shown = None if shown == "train" and recipe.data.streaming else shown
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

    def step(self, step: int) -> dict[str, float]:
        """One update on the next examples; the metrics of the step. Afterwards the weights have version ``step``."""
        clock = Clock()
        with clock.phase("data"):
            batch = self._batch("train", next(self._data))
        with clock.phase("update"):
            metrics = self._interface.train_step(self._engine, batch, self._mb_spec)
            self._engine.lr_scheduler_step()
            self._engine.set_version(step)
        speed = {"tokens_per_s": batch.num_tokens / clock.total()}
        return metrics | speed | clock.seconds | {"version": float(step)}

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
        if self._shown is None:
            return ()
        dataset, samples = self._datasets[self._shown], list[ExampleSample]()
        for index in range(min(SHOWN, len(dataset))):
            batch = self._batch(self._shown, [dataset[index]])
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

    def parts(self, *, portable: bool, background: bool) -> dict[str, Callable[[Path], None]]:
        """Writers, by name, of the parts of a run checkpoint that are not in `state_dict`."""
        return part_writers({MODEL: self._engine}, portable=portable, background=background)

    def wait_for_parts(self) -> None:
        """Return when no part is being written in the background, or raise its error."""
        self._engine.wait_for_saves()

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
