"""`TrainEngine`: the public methods, the same for all engines, over the hooks of a plugin."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from core_rl.config.engine import OptimizerConfig, TrainEngineConfig
from core_rl.config.layout import ParallelLayout
from core_rl.data.batch import SequenceBatch
from core_rl.data.micro_batch import MicroBatchSpec, count_micro_batches, plan_micro_batches
from core_rl.data.shard import shard, shard_plan, unshard_output
from core_rl.engines import guards
from core_rl.engines.collectives import RankGroups, World, agree
from core_rl.engines.grad_norm import global_grad_norm
from core_rl.engines.hooks import TrainHooks
from core_rl.engines.loss import LossSpec
from core_rl.engines.meta import (
    FinetuneSpec,
    RankAddress,
    SaveLoadMeta,
    Scheduling,
    StatePart,
    TensorKind,
    WeightUpdateMeta,
)
from core_rl.engines.metrics import merge_metrics
from core_rl.engines.named_tensors import NamedTensors, TensorSource, check_source
from core_rl.engines.outputs import ModelOutput, OutputName
from core_rl.engines.post_hook import AggregateFn, gather_collected
from core_rl.engines.process_group import Membership, join, pick_device
from core_rl.engines.progress import EngineProgress, Pending
from core_rl.engines.schedule import learning_rate, schedule_length
from core_rl.engines.spec import Capability, EngineSpec
from core_rl.engines.steps import CollectStep, LossStep, MicroBatches, PostHook
from core_rl.errors import ConfigError, EngineStateError, LossError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from core_rl.checkpoint.background import BackgroundSave

__all__ = ["TrainEngine"]

logger = logging.getLogger(__name__)


class TrainEngine(TrainHooks):
    """One rank of a sharded model that is trained.

    All methods are collective unless they say otherwise: each rank of the engine's world calls them
    in the same order, model-parallel peers with the same data, data-parallel ranks each with its
    own shard. Results are the same on every rank of a model-parallel group.

    A plugin subclasses it and fills in the hooks of `TrainHooks`; it overrides no public method.
    """

    def __init__(self, spec: EngineSpec, config: TrainEngineConfig) -> None:
        guards.check_config(spec, config)
        self.spec = spec
        self.config = config
        self._state = "new"
        self._mode: str | None = None
        self._offloaded: frozenset[StatePart] = frozenset()
        self._base_only: AbstractContextManager[None] | None = None
        self._pending = Pending()
        self._progress = EngineProgress()
        self._background: BackgroundSave | None = None

    # ------------------------------------------------------------- life cycle

    def initialize(self, addr: RankAddress | None = None, ft_spec: FinetuneSpec | None = None) -> None:
        """Join the process group and build module and optimizer.

        Raises `LayoutError` when the layout does not multiply to the world size, `ConfigError` when
        the model cannot be built, `UnsupportedCapability` for a mixture of experts where the engine
        declares none, `EngineStateError` when called twice, and what `load` raises for
        ``model.lora.path``.
        """
        guards.require_state(self._state, "new", "initialize()")
        self.device = pick_device(self.config.device, addr.local_rank if addr else 0)
        guards.check_device(self.spec, self.device)
        if addr is not None:
            self.layout.check_world(addr.world_size)
        self._total_steps = self._schedule_length(ft_spec)
        self._membership: Membership = join(addr, self.device)
        try:
            self.layout.check_world(self.world.size)
            self._rank_groups: RankGroups = self._groups(self.world)
            self._build(self._membership.address, ft_spec or FinetuneSpec())
            guards.check_experts(self.spec, self.config.model, self._hf_config())
            self._set_training(False)
            self._state = "ready"
            self._start_adapter()
            self._send_away(parts_of(self.config.offload_params, self.config.offload_optimizer))
        except BaseException:
            self._state = "new"
            self._membership.leave()
            raise

    def _start_adapter(self) -> None:
        """Load the adapter that the config names."""
        lora = self.config.model.lora
        if lora is not None and lora.path is not None:
            self.load(SaveLoadMeta(path=lora.path, format="adapter"))

    def destroy(self) -> None:
        """Free the model and leave the process group; the engine cannot be used again.

        Waits for a save in the background, and raises its `CheckpointError` after all is freed.
        """
        ready, self._state = self._state == "ready", "destroyed"
        if ready:
            try:
                self._finish_saving()
            finally:
                self._teardown()
                self._membership.leave()

    def _schedule_length(self, ft_spec: FinetuneSpec | None) -> int | None:
        if self.config.optimizer is None:
            return None
        return schedule_length(self.config.optimizer, ft_spec.total_train_steps if ft_spec else None)

    # ---------------------------------------------------------------- places

    @property
    def layout(self) -> ParallelLayout:
        """The parallel degrees."""
        return self.config.layout

    @property
    def world(self) -> World:
        """All ranks of this engine."""
        return self._membership.world

    @property
    def timeout_s(self) -> float:
        """How long ranks wait for each other, in seconds."""
        return self._membership.address.timeout_s

    @property
    def data_parallel_rank(self) -> int:
        """This rank's number among those that see other sequences."""
        return self._rank_groups.data_parallel.rank

    @property
    def data_parallel_size(self) -> int:
        """How many parts a batch is split into."""
        return self._rank_groups.data_parallel.size

    @property
    def data_parallel_group(self) -> World:
        """The ranks at the same place of the model that see other sequences."""
        return self._rank_groups.data_parallel

    @property
    def is_output_rank(self) -> bool:
        """Whether exported tensors appear on this rank: one rank of each model-parallel group."""
        return self._rank_groups.is_output_rank

    @property
    def is_writer(self) -> bool:
        """Whether this rank writes what exists once: the output rank of data-parallel rank 0."""
        return self.is_output_rank and self.data_parallel_rank == 0

    # ----------------------------------------------------------------- modes

    @contextmanager
    def train_mode(self) -> Iterator[None]:
        """Training mode (dropout on) inside the context; offloaded weights are there meanwhile."""
        with self._in_mode("train"):
            yield

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        """Evaluation mode (dropout off) inside the context; offloaded weights are there meanwhile."""
        with self._in_mode("eval"):
            yield

    @contextmanager
    def _in_mode(self, mode: str) -> Iterator[None]:
        guards.require_state(self._state, "ready", f"{mode}_mode()")
        previous = self._mode
        with self._onloaded("model"):
            self._mode = mode
            self._set_training(mode == "train")
            try:
                yield
            finally:
                self._mode = previous
                self._set_training(previous == "train")

    @contextmanager
    def _onloaded(self, *parts: StatePart) -> Iterator[None]:
        """These parts on the engine's device inside the context; offloaded again after it if they were before."""
        away = self._offloaded.intersection(parts)
        self._bring_back(away)
        try:
            yield
        finally:
            self._send_away(away)

    # -------------------------------------------------------------- training

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
            weights = agree(self.data_parallel_group, lambda: sum(map(loss.weight, micro_batches.real())))
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
        with self._onloaded("model", "optimizer"):
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

        count = max(agree(self.data_parallel_group, wanted))
        multiple = self._micro_batch_multiple
        plan = plan_micro_batches(batch, mb_spec, -(-count // multiple) * multiple)
        return MicroBatches(batch, plan, self.device)

    def _run_all(self, micro_batches: MicroBatches, step: LossStep | CollectStep, forward_only: bool) -> None:
        with torch.set_grad_enabled(not forward_only):
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

    # ----------------------------------------------------------------- state

    def hf_config(self) -> PretrainedConfig:
        """The transformers config of the model with its head. No collective."""
        return self._hf_config()

    def named_tensors(self, kind: TensorKind) -> NamedTensors:
        """Stream parameter-shaped quantities in the Hugging Face layout; see `NamedTensors`.

        ``grads`` are there between ``forward_backward`` and ``optimizer_step``: reduced, normalised,
        not clipped. With an adapter (``model.lora``), ``params`` are the weights with the adapter merged
        into them, ``adapter`` is the adapter (and a value or reward head) under the names of ``peft``
        in float32, and ``master`` holds the base weights and the adapter beside each other.
        """
        guards.require_state(self._state, "ready", "named_tensors()")
        guards.require_kind(self.config, kind)
        if kind == "params":
            guards.require_adapter_on(self._adapter_off, "named_tensors('params')")
        guards.require_present(self._offloaded, kind)
        if kind == "grads":
            if not self._pending.passes:
                raise EngineStateError("there are no gradients to export; call forward_backward() first")
            self._ensure_reduced()
        return self._named_tensors(kind)

    def tensor_shapes(self, kind: TensorKind) -> dict[str, tuple[int, ...]]:
        """Names and full shapes of what `named_tensors` streams. No collective."""
        return self._tensor_shapes(kind)

    def load_named_tensors(self, kind: TensorKind, source: TensorSource) -> None:
        """Set parameters, moments or buffers; `WeightsError` lists every name or shape that is off."""
        guards.require_state(self._state, "ready", "load_named_tensors()")
        guards.require_kind(self.config, kind)
        guards.require_loadable(self.config, kind)
        check_source(source, self._tensor_shapes(kind), f"loading {kind!r}")
        with self._onloaded(guards.part_of(kind)):
            self._load_named_tensors(kind, source)

    def save(self, meta: SaveLoadMeta) -> None:
        """Write a checkpoint, atomically; `CheckpointError` leaves what was there untouched.

        With ``meta.asynchronous`` it returns when what is saved can no longer change: each rank has copied
        the parts that it holds to host memory (an engine that cannot has written its files by then).
        Files, digests, flushing and the renaming into place come while training goes on.
        `wait_for_saves` waits for that, and so do the next ``save``, ``load`` and ``destroy``; whichever
        comes first raises what went wrong.
        """
        from core_rl.checkpoint.formats import save_engine

        guards.require_state(self._state, "ready", "save()")
        if meta.format == "hf":
            guards.require_adapter_on(self._adapter_off, "save(format='hf')")
        self._finish_saving()
        with self._onloaded("model", "optimizer"):
            self._background = save_engine(self, meta)

    def wait_for_saves(self) -> None:
        """Return when no save is going on in the background.

        Raises one `CheckpointError` on all ranks if one failed on any of them; what was at its place
        before is untouched.
        """
        guards.require_state(self._state, "ready", "wait_for_saves()")
        self._finish_saving()

    def _finish_saving(self) -> None:
        saving, self._background = self._background, None
        if saving is not None:
            saving.wait(self.world)

    def load(self, meta: SaveLoadMeta) -> None:
        """Read a checkpoint; a damaged or foreign one is refused before anything changes."""
        from core_rl.checkpoint.formats import load_engine_state

        guards.require_state(self._state, "ready", "load()")
        self._finish_saving()
        self.optimizer_zero_grad()
        with self._onloaded("model", "optimizer"):
            load_engine_state(self, meta)

    def upload_weights(self, meta: WeightUpdateMeta) -> None:
        """Send the weights to inference engines, which take them by ``update_weights(meta)``."""
        guards.require_state(self._state, "ready", "upload_weights()")
        guards.require_sync(self.spec, meta)
        if meta.method == "disk":
            self.save(SaveLoadMeta(path=str(meta.directory), format="hf", with_optimizer=False))
        else:
            with self._onloaded("model"):
                self._send_weights(meta)

    @property
    def progress(self) -> EngineProgress:
        """Scheduler steps, updates and version."""
        return self._progress

    def restore_progress(self, progress: EngineProgress) -> None:
        """Go on from ``progress``, as a checkpoint does. No collective."""
        self._progress = replace(progress)
        if self.config.optimizer is not None:
            with self._onloaded("optimizer"):
                self._set_update_count(progress.updates)

    def set_version(self, version: int) -> None:
        """Record the version that the driver gave to the weights. No collective."""
        self._progress = replace(self._progress, version=version)

    def get_version(self) -> int:
        """The version that the driver gave to the weights. No collective."""
        return self._progress.version

    def get_scheduling_config(self) -> Scheduling:
        """Resources that one rank needs. No collective."""
        return self._scheduling()

    # ------------------------------------------------------------- optional

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """The base model inside the context: adapters off in `forward` and `eval_batch`.

        Training and exports of merged weights are refused inside. Raises `EngineStateError` where
        ``model.lora`` is not set.
        """
        was_on = self._switch_adapter(on=False)
        try:
            yield
        finally:
            self._switch_adapter(on=was_on)

    @property
    def _adapter_off(self) -> bool:
        return self._base_only is not None

    def _switch_adapter(self, on: bool) -> bool:
        """Either half of `disable_adapter`, for a driver, which cannot hold a context of another process.

        Returns whether the adapter was on.
        """
        was_on = not self._adapter_off
        guards.require_capability(self.spec, Capability.LORA, "disable_adapter()")
        guards.require_state(self._state, "ready", "disable_adapter()")
        guards.require_adapter(self.config, "disable_adapter()")
        if on and self._base_only is not None:
            context, self._base_only = self._base_only, None
            context.__exit__(None, None, None)
        elif not on and self._base_only is None:
            context = self._adapter_disabled()
            context.__enter__()
            self._base_only = context
        return was_on

    def to(self, device: torch.device | str, model: bool = True, optimizer: bool = True) -> None:
        """Weights and gradients (``model``) and moments (``optimizer``): back to the engine's device, or to the host.

        On an engine whose device is the CPU, ``to("cpu")`` brings back what `offload` took away. Raises
        `ConfigError` for a third device. No collective.
        """
        target = torch.device(device)
        guards.require_state(self._state, "ready", "to()")
        if target.type not in ("cpu", self.device.type):
            raise ConfigError(f"to({str(device)!r}): this engine lives on {self.device}; name that, or 'cpu'")
        self._move(parts_of(model, optimizer), "to()", away=target.type != self.device.type)

    def onload(self) -> None:
        """Bring everything back to the engine's device. No collective."""
        self._move(parts_of(True, True), "onload()", away=False)

    def offload(self) -> None:
        """Keep everything in host memory until `onload`; modes and calls that need it bring it back meanwhile.

        What is offloaded is not on the device, also where that is the CPU: reading it raises
        `EngineStateError`. No collective.
        """
        self._move(parts_of(True, True), "offload()", away=True)

    def _move(self, parts: frozenset[StatePart], method: str, *, away: bool) -> None:
        guards.require_state(self._state, "ready", method)
        guards.require_capability(self.spec, Capability.OFFLOAD, method)
        if self._mode is not None and "model" in parts and away:
            raise EngineStateError(f"{method} inside {self._mode}_mode(); leave the context first")
        (self._send_away if away else self._bring_back)(parts)

    def _send_away(self, parts: frozenset[StatePart]) -> None:
        for part in sorted(parts - self._offloaded):
            self._offload(part)
            self._offloaded |= {part}

    def _bring_back(self, parts: frozenset[StatePart]) -> None:
        for part in sorted(parts & self._offloaded):
            self._onload(part)
            self._offloaded -= {part}


def parts_of(model: bool, optimizer: bool) -> frozenset[StatePart]:
    """The parts that are asked for."""
    chosen: dict[StatePart, bool] = {"model": model, "optimizer": optimizer}
    return frozenset(part for part, wanted in chosen.items() if wanted)
