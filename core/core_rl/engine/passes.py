"""`EnginePasses`: training, evaluation and forward passes of a train engine."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from core_rl.backend.loss import LossSpec
from core_rl.backend.metrics import merge_metrics
from core_rl.backend.progress import Pending
from core_rl.backend.schedule import learning_rate
from core_rl.backend.steps import CollectStep, LossStep, MicroBatches, PostHook
from core_rl.config.engine import OptimizerConfig
from core_rl.data.batch import SequenceBatch
from core_rl.data.micro_batch import MicroBatchSpec, count_micro_batches, plan_micro_batches
from core_rl.data.outputs import ModelOutput, OutputName
from core_rl.data.partition import shard, shard_plan, unshard_output
from core_rl.distributed.agreement import agree
from core_rl.engine import guards
from core_rl.engine.modes import EngineModes
from core_rl.engine.post_hook import AggregateFn, gather_collected
from core_rl.errors import BatchError, EngineStateError, LossError
from core_rl.state.grad_norm import global_grad_norm

__all__ = ["EnginePasses"]

logger = logging.getLogger(__name__)


class EnginePasses(EngineModes):
    """Cuts batches, owns the scale of the loss, reduces metrics and decides on steps."""

    def train_batch(self, batch: SequenceBatch, loss: LossSpec, mb_spec: MicroBatchSpec) -> dict[str, float]:
        """One optimizer step on this rank's ``batch``.

        Returns the loss's metrics, ``loss``, the pre-clip ``grad_norm``, ``lr`` and
        ``update_successful`` (0 when the step was skipped: nothing to count, or a non-finite loss or
        gradient on any rank). Does not advance the learning rate.
        """
        with self._in_mode("train"):
            self.optimizer_zero_grad()
            metrics = self.forward_backward(batch, loss, mb_spec)
            return metrics | self.optimizer_step()

    def forward_backward(
        self,
        batch: SequenceBatch,
        loss: LossSpec,
        mb_spec: MicroBatchSpec,
        forward_only: bool = False,
        total_weight: float | None = None,
        total_tokens: int | None = None,
    ) -> dict[str, float]:
        """Accumulate the gradient of (sum of totals) / (sum of weights); returns reduced metrics.

        ``total_weight`` replaces the sum of weights for a caller that spreads one step over several
        calls: it is the sum over all of them and over all data-parallel ranks (this rank's own for
        ``normalize_scope="dp"``), and the result equals one call. ``total_tokens``, their number of all
        tokens, does the same for the load-balancing loss of ``model.router_aux_coef``.
        """
        guards.require_state(self._state, "ready", "forward_backward()")
        guards.check_outputs(self.spec, self.config, loss.outputs)
        if not forward_only:
            guards.require_trainable(self.config, self._mode, self._pending, self._adapter_off)
        with self._in_mode("eval" if forward_only else "train"):
            micro_batches = self._cut(batch, mb_spec)
            weights = agree(
                self.data_parallel_group,
                lambda: sum(map(loss.weight, micro_batches.real())),
                "the weight of the loss",
                foreign=LossError,
            )
            scale = self._loss_scale(loss, weights, total_weight)
            step = LossStep(micro_batches, loss, scale, self._aux_scale(batch, total_weight, total_tokens))
            if sum(weights) > 0 or total_tokens is not None:
                self._run_all(micro_batches, step, forward_only)
            metrics, finite = self._reduced(step, loss, weights)
        if not forward_only:
            self._pending.passes += 1
            self._pending.weight += sum(weights)
            self._pending.finite &= finite
        return metrics

    def optimizer_zero_grad(self) -> None:
        """Drop what has accumulated."""
        guards.require_state(self._state, "ready", "optimizer_zero_grad()")
        self._zero_grad()
        self._pending = Pending()

    def optimizer_step(self) -> dict[str, float]:
        """Clip, update the weights and drop the gradients; or skip, if anything is not finite or nothing counted.

        A skipped step leaves weights and moments untouched and reports ``update_successful`` 0.
        """
        guards.require_state(self._state, "ready", "optimizer_step()")
        optimizer = guards.require_optimizer(self.config)
        if not self._pending.passes:
            raise EngineStateError("optimizer_step() without gradients; call forward_backward() first")
        with self._onloaded("model", "optimizer"), self._draws.own():
            return self._clipped_step(optimizer)

    def _clipped_step(self, optimizer: OptimizerConfig) -> dict[str, float]:
        counted, finite = self._pending.weight > 0, self._pending.finite
        norm = self._reduced_norm() if counted else 0.0
        lr = learning_rate(optimizer, self._progress.lr_steps, self._total_steps)
        successful = counted and finite and math.isfinite(norm)
        if successful:
            limit = optimizer.max_grad_norm
            self._set_lr(lr)
            self._step(1.0 if limit is None else min(1.0, limit / (norm + 1e-6)))
            self._progress = replace(self._progress, updates=self._progress.updates + 1)
        else:
            reason = (
                "no token counts in this batch" if not counted else "the loss or a gradient is not finite"
            )
            logger.warning("optimizer step skipped: %s; weights and moments are unchanged", reason)
        self.optimizer_zero_grad()
        return {"grad_norm": norm, "lr": lr, "update_successful": float(successful)}

    def lr_scheduler_step(self) -> float:
        """Advance the schedule by one and return the learning rate of the next step. No collective."""
        optimizer = guards.require_optimizer(self.config)
        self._progress = replace(self._progress, lr_steps=self._progress.lr_steps + 1)
        return learning_rate(optimizer, self._progress.lr_steps, self._total_steps)

    def eval_batch(self, batch: SequenceBatch, loss: LossSpec, mb_spec: MicroBatchSpec) -> dict[str, float]:
        """The loss and its metrics without gradients, dropout off."""
        return self.forward_backward(batch, loss, mb_spec, forward_only=True)

    def forward(
        self,
        batch: SequenceBatch,
        mb_spec: MicroBatchSpec,
        outputs: tuple[OutputName, ...] = ("logprobs",),
        temperature: float = 1.0,
        output_seqlens: Sequence[int] | None = None,
        post_hook: PostHook | None = None,
        aggregate_fn: AggregateFn | None = None,
    ) -> Any:
        """Outputs for every token (masks are ignored), without gradients, dropout off.

        Returns a `ModelOutput` on the CPU in the order of ``batch``. With ``post_hook(output,
        micro_batch)``, which returns one row for each token, or for each sequence, or
        ``output_seqlens[b]`` rows for sequence ``b``, the rows are put back in the order of the
        sequences and joined by ``aggregate_fn(list of one tensor for each sequence)``, by default
        ``torch.cat``.
        """
        guards.require_state(self._state, "ready", "forward()")
        guards.check_outputs(self.spec, self.config, outputs)
        guards.check_temperature(temperature)
        with self._in_mode("eval"):
            micro_batches = self._cut(batch, mb_spec)
            step = CollectStep(micro_batches, outputs, temperature, post_hook)
            self._run_all(micro_batches, step, forward_only=True)
        groups = self._rank_groups
        collected = groups.model_parallel.broadcast(step.collected, groups.output_source)
        return gather_collected(batch, micro_batches.plan, collected, output_seqlens, aggregate_fn)

    # ------------------------------------------------------ inside a training pass

    def _cut(self, batch: SequenceBatch, mb_spec: MicroBatchSpec) -> MicroBatches:
        """Check the batch and cut it, into equally many micro-batches on all data-parallel ranks."""

        def wanted() -> int:
            guards.check_batch(batch, self._hf_config())
            guards.check_routing(self.spec, batch, self._hf_config())
            return count_micro_batches(batch, mb_spec)

        count = max(agree(self.data_parallel_group, wanted, "the batch", foreign=BatchError))
        multiple = self._micro_batch_multiple
        plan = plan_micro_batches(batch, mb_spec, -(-count // multiple) * multiple)
        return MicroBatches(batch, plan, self.device)

    def _run_all(self, micro_batches: MicroBatches, step: LossStep | CollectStep, forward_only: bool) -> None:
        with torch.set_grad_enabled(not forward_only), self._draws.own():
            self._run(micro_batches.items, step, forward_only)
        if self.is_output_rank:
            micro_batches.check_finished()

    def _loss_scale(self, loss: LossSpec, weights: list[float], total_weight: float | None) -> float:
        """What the sums are multiplied by; the gradients are then *added* over data-parallel ranks."""
        if loss.normalize_scope == "global":
            weight, share = sum(weights), 1.0
        else:
            weight, share = weights[self.data_parallel_rank], 1.0 / self.data_parallel_size
        weight = weight if total_weight is None else total_weight
        return share / weight if weight > 0 else 0.0

    def _aux_scale(self, batch: SequenceBatch, total_weight: float | None, total_tokens: int | None) -> float:
        """What the routers' balance, a sum over tokens, is multiplied by; 0 leaves it out."""
        coefficient = self.config.model.router_aux_coef
        if not coefficient:
            return 0.0
        if total_tokens is None and total_weight is not None:
            raise LossError(
                "model.router_aux_coef balances over all tokens of a step; pass total_tokens beside total_weight"
            )
        tokens = total_tokens or sum(self.data_parallel_group.gather(batch.num_tokens))
        return coefficient / max(1, tokens)

    def _reduced(self, step: LossStep, loss: LossSpec, weights: list[float]) -> tuple[dict[str, float], bool]:
        """Metrics over all micro-batches and ranks, and whether every loss was finite."""
        own = (merge_metrics(step.metrics), step.total()) if self.is_output_rank else None
        answers = [answer for answer in self.world.gather(own) if answer is not None]
        totals = [total for _, total in answers]
        if loss.normalize_scope == "global":
            value = sum(totals) / sum(weights) if sum(weights) else math.nan
        else:
            means = [total / weight if weight else 0.0 for total, weight in zip(totals, weights, strict=True)]
            value = sum(means) / len(means)
        metrics = {
            name: metric.result() for name, metric in merge_metrics(part for part, _ in answers).items()
        }
        return {"loss": value, **metrics}, all(map(math.isfinite, totals))

    def _reduced_norm(self) -> float:
        self._ensure_reduced()
        return global_grad_norm(self._grad_shards(), self.world)

    def _ensure_reduced(self) -> None:
        if not self._pending.reduced:
            self._reduce_grads()
            self._pending.reduced = True

    # -------------------------------------------------------------- sharding

    def shard_data(self, batch: SequenceBatch) -> SequenceBatch:
        """This rank's part of a batch that every rank holds in full. No collective."""
        return shard(batch, self.data_parallel_size)[self.data_parallel_rank]

    def unshard_data(self, output: ModelOutput, batch: SequenceBatch) -> ModelOutput:
        """The inverse for outputs: those of all ranks in the order of the full ``batch``."""
        parts = self.data_parallel_group.gather(output)
        return unshard_output(parts, batch, shard_plan(batch, self.data_parallel_size))
