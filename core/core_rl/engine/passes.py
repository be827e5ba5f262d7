"""`Passes`: training, evaluation and forward passes of a train engine."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from core_rl.backend.loss import LossSpec
from core_rl.backend.metrics import Metric, merge_metrics
from core_rl.backend.steps import CollectStep, LossStep, MicroBatches, PostHook
from core_rl.backend.train_backend import PassMode
from core_rl.data.batch import SequenceBatch
from core_rl.data.micro_batch import MicroBatchSpec, count_micro_batches, plan_micro_batches
from core_rl.data.outputs import ModelOutput, OutputName
from core_rl.data.partition import unshard_output, unshard_rows
from core_rl.distributed.agreement import agree
from core_rl.engine import guards
from core_rl.engine.modes import Modes
from core_rl.engine.runtime import Runtime
from core_rl.errors import BatchError, CoreRLError, LossError, OutOfDeviceMemory

__all__ = ["AggregateFn", "Passes"]

AggregateFn = Callable[[list[Tensor]], Any]

logger = logging.getLogger(__name__)

LESS_MEMORY = (
    "lower MicroBatchSpec.max_tokens (micro_batch_tokens of a recipe), spread the model over more ranks, or compute "
    "activations again in the backward pass (options.gradient_checkpointing of fsdp)"
)


class Passes:
    """Cuts batches, scales losses and reduces metrics."""

    def __init__(self, runtime: Runtime, modes: Modes) -> None:
        self.runtime = runtime
        self.modes = modes

    def forward_backward(
        self,
        batch: SequenceBatch,
        loss: LossSpec,
        mb_spec: MicroBatchSpec,
        mode: PassMode,
        total_weight: float | None = None,
        total_tokens: int | None = None,
    ) -> dict[str, float]:
        """Accumulate the gradient of (sum of totals) / (sum of weights); see `TrainEngine.forward_backward`."""
        run, training = self.runtime, mode != "forward"
        guards.check_outputs(run.spec, run.config, loss.outputs)
        if training:
            guards.require_trainable(run.config, self.modes.mode, self.modes.adapter_off)
            run.pending.require_open()
        with self.modes.inside("train" if training else "eval"):
            micro_batches = self.cut(batch, mb_spec)
            weights = self._weights(loss, micro_batches)
            scale = self.loss_scale(loss, weights, total_weight)
            step = LossStep(micro_batches, loss, scale, self._aux_scale(batch, total_weight, total_tokens))
            with self._marking_failure(training):
                if sum(weights) > 0 or total_tokens is not None:
                    self._run(micro_batches, step, mode)
                metrics, finite = self._reduced(step, loss, weights)
        if training:
            run.pending.passes += 1
            run.pending.weight += sum(weights)
            run.pending.finite &= finite
        return metrics

    def forward(
        self,
        batch: SequenceBatch,
        mb_spec: MicroBatchSpec,
        outputs: tuple[OutputName, ...],
        temperature: float,
        output_seqlens: Sequence[int] | None,
        post_hook: PostHook | None,
        aggregate_fn: AggregateFn | None,
    ) -> Any:
        """Outputs for every token, in the order of ``batch``; see `TrainEngine.forward`."""
        run = self.runtime
        guards.check_outputs(run.spec, run.config, outputs)
        guards.check_temperature(temperature)
        with self.modes.inside("eval"):
            micro_batches = self.cut(batch, mb_spec)
            step = CollectStep(micro_batches, outputs, temperature, post_hook)
            with self._marking_failure(training=False):
                self._run(micro_batches, step, "forward")
                agree(run.world, step.raise_failure, "the pass failed", foreign=BatchError)
        collected = run.groups.model_parallel.broadcast(step.collected, run.groups.output_source)
        # This rank alone may raise here: no collective follows.
        guards.check_output_seqlens(output_seqlens, batch)
        return _gather_collected(batch, micro_batches.plan, collected, output_seqlens, aggregate_fn)

    # ------------------------------------------------------------ inside a pass

    def cut(self, batch: SequenceBatch, mb_spec: MicroBatchSpec) -> MicroBatches:
        """Check the batch and cut it, into equally many micro-batches on all data-parallel ranks."""
        run = self.runtime

        def wanted() -> int:
            guards.check_batch(batch, run.backend.hf_config())
            guards.check_routing(run.spec, batch, run.backend.hf_config())
            return count_micro_batches(batch, mb_spec)

        count = max(agree(run.groups.data_parallel, wanted, "the batch", foreign=BatchError))
        multiple = run.backend.micro_batch_multiple
        plan = plan_micro_batches(batch, mb_spec, -(-count // multiple) * multiple)
        return MicroBatches(batch, plan, run.device)

    def _weights(self, loss: LossSpec, micro_batches: MicroBatches) -> list[float]:
        """The weight of each data-parallel rank's sequences; an error of ``weight_fn`` is raised on all ranks."""
        world, group = self.runtime.world, self.runtime.groups.data_parallel

        def own() -> tuple[int, float]:
            return group.rank, sum(map(loss.weight, micro_batches.real()))

        found = dict(agree(world, own, "weight_fn", foreign=LossError))
        return [found[rank] for rank in range(group.size)]

    def _run(self, micro_batches: MicroBatches, step: LossStep | CollectStep, mode: PassMode) -> None:
        """Run the backend. When it raises in a world of several ranks, the engine has failed."""
        run = self.runtime
        try:
            with torch.set_grad_enabled(mode != "forward"), run.rng.own():
                run.backend.run(micro_batches.items, step, mode)
        except BaseException as error:
            self._abort(error)
            if isinstance(error, torch.OutOfMemoryError):
                raise OutOfDeviceMemory(f"{micro_batches.reached()}\nfix: {LESS_MEMORY}") from error
            raise
        if run.groups.is_output_rank:
            step.require_all()

    def _abort(self, error: BaseException) -> None:
        """Free what the pass left. Where that fails, or other ranks wait for this one, the engine has failed."""
        run = self.runtime
        self._fail(error)
        try:
            run.backend.abort()
        except Exception:  # of a plugin, while its first error is on the way
            logger.exception("abort() raised after a failed pass")
            run.status.fail(error)

    @contextmanager
    def _marking_failure(self, training: bool) -> Iterator[None]:
        """Refuse the next optimizer step after an error inside the context, and all calls where a peer is lost."""
        try:
            yield
        except BaseException as error:
            self.runtime.pending.failed |= training
            # Errors that ranks agree on are of ours; any other is of this rank alone, as a collective's timeout.
            if not isinstance(error, CoreRLError):
                self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        """Take the engine for failed, unless it is the only rank."""
        if self.runtime.world.size > 1:
            self.runtime.status.fail(error)

    def loss_scale(self, loss: LossSpec, weights: list[float], total_weight: float | None) -> float:
        """The factor of the sums; the gradients are then *added* over data-parallel ranks."""
        group = self.runtime.groups.data_parallel
        if loss.normalize_scope == "global":
            weight, share = sum(weights), 1.0
        else:
            weight, share = weights[group.rank], 1.0 / group.size
        weight = weight if total_weight is None else total_weight
        return share / weight if weight > 0 else 0.0

    def _aux_scale(self, batch: SequenceBatch, total_weight: float | None, total_tokens: int | None) -> float:
        """The factor of the routers' load-balancing loss, a sum over tokens; 0 leaves it out."""
        coefficient = self.runtime.config.model.router_aux_coef
        if not coefficient:
            return 0.0
        if total_tokens is None and total_weight is not None:
            raise LossError(
                "model.router_aux_coef balances over all tokens of a step; pass total_tokens with total_weight"
            )
        tokens = total_tokens or sum(self.runtime.groups.data_parallel.gather(batch.num_tokens))
        return coefficient / max(1, tokens)

    def _reduced(self, step: LossStep, loss: LossSpec, weights: list[float]) -> tuple[dict[str, float], bool]:
        """Metrics over all micro-batches and ranks, and whether every loss was finite."""
        is_output_rank = self.runtime.groups.is_output_rank

        def own() -> tuple[dict[str, Metric], float] | None:
            step.raise_failure()
            return (merge_metrics(step.metrics), step.total()) if is_output_rank else None

        gathered = agree(self.runtime.world, own, "the pass failed", foreign=LossError)
        answers = [answer for answer in gathered if answer is not None]
        totals = [total for _, total in answers]
        if loss.normalize_scope == "global":
            value = sum(totals) / sum(weights) if sum(weights) else math.nan
        else:
            means = [total / weight if weight else 0.0 for total, weight in zip(totals, weights, strict=True)]
            value = sum(means) / len(means)
        merged = merge_metrics(part for part, _ in answers)
        return {"loss": value, **{name: metric.result() for name, metric in merged.items()}}, all(
            map(math.isfinite, totals)
        )


def _gather_collected(
    batch: SequenceBatch,
    plan: Sequence[Sequence[int]],
    collected: Mapping[int, ModelOutput | Tensor],
    output_seqlens: Sequence[int] | None,
    aggregate_fn: AggregateFn | None,
) -> Any:
    """Gather what was ``collected`` for each micro-batch of ``plan``, in the order of ``batch``."""
    numbers = [number for number, part in enumerate(plan) if part]
    parts, values = [plan[number] for number in numbers], [collected[number] for number in numbers]
    outputs = [value for value in values if isinstance(value, ModelOutput)]
    if len(outputs) == len(values):
        return unshard_output(outputs, batch, parts)
    sizes = batch.lengths if output_seqlens is None else output_seqlens
    rows = [
        _rows(value, [sizes[index] for index in part], fixed=output_seqlens is not None)
        for value, part in zip(values, parts, strict=True)
    ]
    return (aggregate_fn or torch.cat)(unshard_rows(rows, parts))


def _rows(value: ModelOutput | Tensor, sizes: list[int], *, fixed: bool) -> Sequence[Tensor]:
    """One tensor for each sequence of a micro-batch: ``sizes`` rows each, or one where they are not ``fixed``."""
    if not isinstance(value, Tensor):
        raise BatchError(f"post_hook must return a tensor; it returned a {type(value).__name__}")
    if not fixed and len(value) != sum(sizes):
        sizes = [1] * len(sizes)
    if len(value) != sum(sizes):
        raise BatchError(
            f"post_hook returned {len(value)} rows for {len(sizes)} sequences with {sum(sizes)} expected rows; "
            "return one row for each token or sequence, or pass output_seqlens"
        )
    rows: tuple[Tensor, ...] = value.detach().to("cpu").split(sizes)
    return rows
