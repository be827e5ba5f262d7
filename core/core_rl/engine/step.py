"""`TrainStep`: a step of a train engine, from the passes that accumulate gradients to the update of the weights."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from core_rl.backend.loss import LossSpec
from core_rl.backend.meta import EngineProgress
from core_rl.backend.metrics import Metric, merge_metrics
from core_rl.backend.protocols import SupportsTaps
from core_rl.backend.steps import AggregateFn, CollectStep, LossStep, MicroBatches, PostHook
from core_rl.backend.train_backend import PassMode
from core_rl.config.engine import OptimizerConfig
from core_rl.data.batch import SequenceBatch
from core_rl.data.micro_batch import MicroBatchSpec, count_micro_batches, plan_micro_batches
from core_rl.data.outputs import ModelOutput, OutputName
from core_rl.distributed.agreement import gather_or_raise
from core_rl.engine import guards
from core_rl.engine.modes import Modes
from core_rl.engine.runtime import Runtime
from core_rl.engine.schedule import learning_rate
from core_rl.errors import BatchError, CoreRLError, EngineStateError, LossError, OutOfDeviceMemory
from core_rl.state.memory import give_back_freed

logger = logging.getLogger(__name__)

LESS_MEMORY = (
    "lower the tokens of a micro-batch (MicroBatchSpec.max_tokens), spread the model over more ranks, or have the "
    "engine recompute activations in the backward pass"
)


@dataclass
class Accumulated:
    """Gradients since the last optimizer step."""

    passes: int = 0
    weight: float = 0.0
    finite: bool = True
    reduced: bool = False
    failed: bool = False
    """A pass raised, so that the gradients are of a part of the batch."""


class TrainStep:
    """Passes of one engine, the gradients that they accumulate, its updates and its progress."""

    def __init__(self, runtime: Runtime, modes: Modes) -> None:
        self.runtime = runtime
        self.modes = modes
        self.progress = EngineProgress()
        self.gradients = Accumulated()
        self.failure: BaseException | None = None
        """The first error of a pass after which ranks are not in step any more."""

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
            self._require_open()
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
            self.gradients.passes += 1
            self.gradients.weight += sum(weights)
            self.gradients.finite &= finite
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
        run, tapped = self.runtime, "hidden_states" in outputs
        if tapped:
            guards.check_taps(run.spec, post_hook)
            # A shared prefix has no rows of its own in each sequence.
            mb_spec = replace(mb_spec, share_prefixes=False)
            outputs = tuple(name for name in outputs if name != "hidden_states")
        guards.check_outputs(run.spec, run.config, outputs)
        guards.check_temperature(temperature)
        with self.modes.inside("eval"):
            micro_batches = self.cut(batch, mb_spec)
            step = CollectStep(micro_batches, outputs, temperature, post_hook)
            with self._marking_failure(training=False), self._tap(micro_batches, tapped) as states:
                self._run(micro_batches, step, "forward")
                gather_or_raise(run.world, step.raise_failure, "the pass failed", foreign=BatchError)
        collected = run.groups.model_parallel.broadcast(step.collected, run.groups.output_source)
        if tapped:
            collected = _with_hidden_states(collected, run.groups.model_parallel.gather(states))
        # This rank alone may raise here: no collective follows.
        guards.check_output_seqlens(output_seqlens, batch)
        return step.in_order(batch, collected, output_seqlens, aggregate_fn)

    # ------------------------------------------------------------ inside a pass

    def _tap(
        self, micro_batches: MicroBatches, tapped: bool
    ) -> AbstractContextManager[Mapping[int, Sequence[Tensor]]]:
        backend = self.runtime.backend
        if not tapped:
            return nullcontext({})
        assert isinstance(backend, SupportsTaps)  # `load_backend` compares it with the spec
        return backend.tap(micro_batches.items)

    def cut(self, batch: SequenceBatch, mb_spec: MicroBatchSpec) -> MicroBatches:
        """Check the batch and cut it, into equally many micro-batches on all data-parallel ranks."""
        run = self.runtime
        shares = guards.shares_prefixes(run.spec, mb_spec)
        spec = mb_spec if shares else replace(mb_spec, share_prefixes=False)

        def count_here() -> int:
            if shares:
                self.check_sharing()
            guards.check_batch(batch, run.model, run.limits)
            guards.check_routing(run.spec, batch, run.model)
            return count_micro_batches(batch, spec)

        count = max(gather_or_raise(run.groups.data_parallel, count_here, "the batch", foreign=BatchError))
        multiple = run.backend.micro_batch_multiple
        plan = plan_micro_batches(batch, spec, -(-count // multiple) * multiple)
        return MicroBatches(batch, plan, run.device, shares)

    def check_sharing(self) -> None:
        """Raise `UnsupportedCapability` where shared prefixes cannot be computed once. No collective."""
        guards.check_sharing(self.runtime.config, self.runtime.model)
        self.runtime.backend.check_sharing()

    def _require_open(self) -> None:
        """Raise `EngineStateError` where no more gradients may be added."""
        if self.gradients.failed:
            raise EngineStateError(
                "forward_backward() after a pass that raised: the gradients are of a part of the batch; call "
                "optimizer_zero_grad() first"
            )
        if self.gradients.reduced:
            raise EngineStateError(
                "the gradients were already reduced by an export; call optimizer_step() or optimizer_zero_grad() first"
            )

    def _weights(self, loss: LossSpec, micro_batches: MicroBatches) -> list[float]:
        """The weight of each data-parallel rank's sequences; an error of ``weight_fn`` is raised on all ranks."""
        world, group = self.runtime.world, self.runtime.groups.data_parallel

        def weight_here() -> tuple[int, float]:
            return group.rank, sum(map(loss.weight, micro_batches.real()))

        weights = dict(gather_or_raise(world, weight_here, "weight_fn", foreign=LossError))
        return [weights[rank] for rank in range(group.size)]

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
        """Free leftovers of the pass. Where that fails, or peers wait for this rank, the engine has failed."""
        run = self.runtime
        self._fail(error)
        try:
            run.backend.abort()
        except Exception:  # of a plugin, while its first error is on the way
            logger.exception("abort() raised after a failed pass")
            self.failure = error

    @contextmanager
    def _marking_failure(self, training: bool) -> Iterator[None]:
        """Refuse the next optimizer step after an error inside the context, and all calls where a peer is lost."""
        try:
            yield
        except BaseException as error:
            self.gradients.failed |= training
            # Errors that ranks agree on are of ours; any other is of this rank alone, as a collective's timeout.
            if not isinstance(error, CoreRLError):
                self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        """Take the engine for failed, unless it is the only rank."""
        if self.runtime.world.size > 1:
            self.failure = error

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

        def result_here() -> tuple[dict[str, Metric], float] | None:
            step.raise_failure()
            return (merge_metrics(step.metrics), step.total()) if is_output_rank else None

        gathered = gather_or_raise(self.runtime.world, result_here, "the pass failed", foreign=LossError)
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

    # ------------------------------------------------------------------ update

    def optimizer_step(self) -> dict[str, float]:
        """Clip, update the weights and drop the gradients, or skip; see `TrainEngine.optimizer_step`."""
        run = self.runtime
        optimizer = guards.require_optimizer(run.config)
        if self.gradients.failed:
            raise EngineStateError(
                "optimizer_step() after a pass that raised: the gradients are of a part of the batch; call "
                "optimizer_zero_grad() and forward_backward() again"
            )
        if not self.gradients.passes:
            raise EngineStateError("optimizer_step() without gradients; call forward_backward() first")
        with self.modes.onloaded("model", "optimizer"), run.rng.own():
            metrics = self._clipped_step(optimizer)
        if run.device.type == "cpu":
            give_back_freed()
        return metrics

    def _clipped_step(self, optimizer: OptimizerConfig) -> dict[str, float]:
        run = self.runtime
        counted, finite = self.gradients.weight > 0, self.gradients.finite
        norm = self.grad_norm() if counted else 0.0
        lr = self.learning_rate(optimizer)
        successful = counted and finite and math.isfinite(norm)
        if successful:
            count = self.progress.updates + 1
            run.backend.step(self.clip_scale(optimizer, norm), lr, count)
            self.progress = replace(self.progress, updates=count)
        else:
            reason = (
                "no token counts in this batch" if not counted else "the loss or a gradient is not finite"
            )
            logger.warning("optimizer step skipped: %s; weights and moments are unchanged", reason)
        self.zero_grad()
        return {"grad_norm": norm, "lr": lr, "update_successful": float(successful)}

    def clip_scale(self, optimizer: OptimizerConfig, norm: float) -> float:
        """The factor of the gradients that brings their norm down to ``max_grad_norm``."""
        limit = optimizer.max_grad_norm
        return 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))

    def grad_norm(self) -> float:
        """The pre-clip norm of the reduced gradients."""
        self.reduce()
        return self.runtime.tensors.grad_norm()

    def reduce(self) -> None:
        """Reduce the gradients over data-parallel ranks, once."""
        if not self.gradients.reduced:
            self.runtime.backend.reduce_grads()
            self.gradients.reduced = True

    def learning_rate(self, optimizer: OptimizerConfig) -> float:
        """The learning rate of the next step."""
        run = self.runtime
        return learning_rate(optimizer, self.progress.lr_steps, run.schedule_steps, run.schedule_function)

    def lr_scheduler_step(self) -> float:
        """Advance the schedule by one; returns the learning rate of the next step."""
        run = self.runtime
        optimizer = guards.require_optimizer(run.config)
        self.progress = replace(self.progress, lr_steps=self.progress.lr_steps + 1)
        return self.learning_rate(optimizer)

    def set_version(self, version: int) -> None:
        """Record the version of the weights."""
        self.progress = replace(self.progress, version=version)

    def zero_grad(self) -> None:
        """Drop the gradients; of an offloaded model, as soon as it is back."""
        self.modes.zero_grad()
        self.gradients = Accumulated()


def _with_hidden_states(
    collected: Mapping[int, ModelOutput], ranks: Sequence[Mapping[int, Sequence[Tensor]]]
) -> dict[int, ModelOutput]:
    """Outputs by micro-batch with the states that the ``ranks`` of one copy of the model have recorded, by layer."""
    layers = {layer: parts for states in ranks for layer, parts in states.items()}
    return {
        number: replace(output, hidden_states=torch.stack([layers[i][number] for i in sorted(layers)], dim=1))
        for number, output in collected.items()
    }
