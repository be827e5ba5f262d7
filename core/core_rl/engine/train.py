"""`TrainEngine`: the public face of every train engine, over a `TrainBackend`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, final

import torch

from core_rl.backend.loss import LossSpec
from core_rl.backend.meta import (
    EngineProgress,
    FinetuneSpec,
    SaveLoadMeta,
    Scheduling,
    TensorKind,
    WeightUpdateMeta,
)
from core_rl.backend.steps import AggregateFn, PostHook
from core_rl.backend.tensors import NamedTensors, TensorSource
from core_rl.backend.train_backend import AnyTrainBackend, PassMode
from core_rl.config.capability import Capability
from core_rl.config.engine import TrainEngineConfig
from core_rl.config.layout import ParallelLayout
from core_rl.data.batch import SequenceBatch
from core_rl.data.micro_batch import MicroBatchSpec, shard_plan, unshard_output
from core_rl.data.outputs import ModelOutput, OutputName
from core_rl.distributed.comm import Comm
from core_rl.distributed.process_group import RankAddress
from core_rl.engine import guards
from core_rl.engine.components import Parts, TrainComponents
from core_rl.engine.modes import parts_of
from core_rl.errors import ConfigError, EngineContractError, EngineStateError, UnsupportedCapability
from core_rl.registry.spec import EngineSpec
from core_rl.state.memory import give_back_freed

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@final
class TrainEngine:
    """One rank of a sharded model that is trained.

    All methods are collective unless they say otherwise: each rank of the engine's world calls them
    in the same order, model-parallel peers with the same data, data-parallel ranks each with its
    own shard. Results are the same on every rank of a model-parallel group.

    A plugin implements `TrainBackend` and subclasses nothing of this.
    """

    device: torch.device
    """Device on which this rank computes."""

    def __init_subclass__(cls) -> None:
        raise EngineContractError(
            f"{cls.__module__}.{cls.__qualname__} subclasses TrainEngine, which is final; implement TrainBackend "
            "(docs/write-an-engine.md)"
        )

    def __init__(
        self,
        spec: EngineSpec,
        config: TrainEngineConfig,
        backend: AnyTrainBackend,
        components: TrainComponents | None = None,
    ) -> None:
        guards.check_config(spec, config)
        self.spec = spec
        self.config = config
        self.backend = backend
        """The plugin's object, for tests and debugging."""
        self._components = components or TrainComponents()
        self._state = "new"

    # ------------------------------------------------------------- life cycle

    def initialize(self, addr: RankAddress | None = None, ft_spec: FinetuneSpec | None = None) -> None:
        """Join the process group and build module and optimizer.

        Without ``addr`` the engine joins the world of ``torch.distributed`` where there is one, and else is a rank
        alone. Raises `LayoutError` when the layout does not multiply to the world size, and `ConfigError` when the
        model cannot be built, or when it would be alone in each of several processes of ``torchrun`` or ``srun``.
        Raises `UnsupportedCapability` for a mixture of experts where the engine declares none, `EngineStateError` when
        called twice, and what `load` raises for ``model.lora.path``.
        """
        self._require("new", "initialize()")
        with ExitStack() as resources:
            self._parts = self._components.build(
                self.spec, self.config, self.backend, addr, ft_spec, resources
            )
            self.config, self.device = self._parts.runtime.config, self._parts.runtime.device
            lora = self.config.model.lora
            if lora is not None and lora.path is not None:
                self._parts.persistence.load(SaveLoadMeta(path=lora.path, format="adapter"))
            self._parts.modes.offload(parts_of(self.config.offload_params, self.config.offload_optimizer))
            self._resources = resources.pop_all()
        self._state = "ready"
        give_back_freed()

    def destroy(self) -> None:
        """Free the model and leave the process group; the engine cannot be used again.

        Waits for a save in the background, and raises its `CheckpointError` after all is freed.
        """
        before, self._state = self._state, "destroyed"
        if before != "ready":
            return
        try:
            if self._parts.step.failure is None:
                self._parts.persistence.wait_for_saves()
        finally:
            self._resources.close()

    def _ready(self, method: str) -> Parts:
        """The parts of an engine that is ready; raises `EngineStateError` for any other."""
        self._require("ready", method)
        return self._parts

    def _require(self, needed: str, method: str) -> None:
        """Raise `EngineStateError` unless the engine is in the state that ``method`` needs."""
        failure = self._parts.step.failure if self._state == "ready" else None
        if failure is not None:
            raise EngineStateError(
                f"{method} on an engine that has failed: {type(failure).__name__}: {failure}. Its ranks are "
                "not in step any more; destroy() it and build another"
            ) from failure
        guards.require_state(self._state, needed, method)

    # ------------------------------------------------------------------ ranks

    @property
    def layout(self) -> ParallelLayout:
        """The parallel degrees."""
        return self.config.layout

    @property
    def world(self) -> Comm:
        """All ranks of this engine."""
        return self._parts.runtime.world

    @property
    def data_parallel_rank(self) -> int:
        """Data-parallel rank: each sees different sequences."""
        return self._parts.runtime.groups.data_parallel.rank

    @property
    def data_parallel_size(self) -> int:
        """The number of parts that a batch is split into."""
        return self._parts.runtime.groups.data_parallel.size

    @property
    def data_parallel_group(self) -> Comm:
        """The ranks with the same part of the model that see other sequences."""
        return self._parts.runtime.groups.data_parallel

    @property
    def is_output_rank(self) -> bool:
        """Whether outputs appear on this rank: one rank of each model-parallel group."""
        return self._parts.runtime.groups.is_output_rank

    @property
    def is_writer(self) -> bool:
        """Whether this rank writes what exists once, and receives exported tensors."""
        return self._parts.runtime.groups.is_writer

    # ----------------------------------------------------------------- modes

    def train_mode(self) -> AbstractContextManager[None]:
        """Training mode (dropout on) inside the context; offloaded weights are on the device there."""
        return self._ready("train_mode()").modes.inside("train")

    def eval_mode(self) -> AbstractContextManager[None]:
        """Evaluation mode (dropout off) inside the context; offloaded weights are on the device there."""
        return self._ready("eval_mode()").modes.inside("eval")

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """The base model inside the context: adapters off in `forward` and `eval_batch`.

        Training and exports of merged weights are refused inside. Raises `EngineStateError` where
        ``model.lora`` is not set.
        """
        was_on = self.switch_adapter(on=False)
        try:
            yield
        finally:
            self.switch_adapter(on=was_on)

    def switch_adapter(self, on: bool) -> bool:
        """Either half of `disable_adapter`, for a driver in another process; returns whether the adapter was on."""
        guards.require_capability(self.spec, Capability.LORA, "disable_adapter()")
        self._require("ready", "disable_adapter()")
        guards.require_adapter(self.config, "disable_adapter()")
        return self._parts.modes.switch_adapter(on)

    def to(self, device: torch.device | str, model: bool = True, optimizer: bool = True) -> None:
        """Weights and gradients (``model``) and moments (``optimizer``): back to the engine's device, or to the host.

        On an engine whose device is the CPU, ``to("cpu")`` brings back what `offload` took away. Raises
        `ConfigError` for a third device. No collective.
        """
        target = torch.device(device)
        self._require("ready", "to()")
        if target.type not in ("cpu", self.device.type):
            raise ConfigError(f"to({str(device)!r}): this engine runs on {self.device}; name that, or 'cpu'")
        self._parts.modes.move(parts_of(model, optimizer), "to()", away=target.type != self.device.type)

    def onload(self) -> None:
        """Bring everything back to the engine's device. No collective."""
        self._ready("onload()").modes.move(parts_of(True, True), "onload()", away=False)

    def offload(self) -> None:
        """Keep everything in host memory until `onload`; modes and calls that need it bring it back meanwhile.

        Offloaded tensors are not on the device, also where that is the CPU: reading them raises
        `EngineStateError`. No collective.
        """
        self._ready("offload()").modes.move(parts_of(True, True), "offload()", away=True)

    # ----------------------------------------------------------------- passes

    def train_batch(self, batch: SequenceBatch, loss: LossSpec, mb_spec: MicroBatchSpec) -> dict[str, float]:
        """One optimizer step on this rank's ``batch``.

        Returns the loss's metrics, ``loss``, the pre-clip ``grad_norm``, ``lr`` and
        ``update_successful`` (0 when the step was skipped: nothing to count, or a non-finite loss or
        gradient on any rank). Does not advance the learning rate.
        """
        parts = self._ready("train_batch()")
        with parts.modes.inside("train"):
            parts.step.zero_grad()
            metrics = parts.step.forward_backward(batch, loss, mb_spec, "last")
            return metrics | parts.step.optimizer_step()

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

        An error of the loss is raised on all ranks; then `optimizer_zero_grad` comes before the next pass.
        """
        self._require("ready", "forward_backward()")
        mode: PassMode = "forward" if forward_only else "accumulate"
        return self._parts.step.forward_backward(batch, loss, mb_spec, mode, total_weight, total_tokens)

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

        Returns a `ModelOutput` on the CPU in the order of ``batch``. ``post_hook(output,
        micro_batch)`` returns one row for each token, or for each sequence, or
        ``output_seqlens[b]`` rows for sequence ``b``. Its rows are put back in the order of the
        sequences and joined by ``aggregate_fn(list of one tensor for each sequence)``, by default
        ``torch.cat``.
        """
        return self._ready("forward()").step.forward(
            batch, mb_spec, outputs, temperature, output_seqlens, post_hook, aggregate_fn
        )

    @property
    def shares_prefixes(self) -> bool:
        """Whether ``MicroBatchSpec.share_prefixes`` saves work: declared, and possible with this model and layout."""
        if Capability.SHARED_PREFIX not in self.spec.capabilities:
            return False
        try:
            self._ready("shares_prefixes").step.check_sharing()
        except UnsupportedCapability:
            return False
        return True

    def optimizer_zero_grad(self) -> None:
        """Drop accumulated gradients."""
        self._ready("optimizer_zero_grad()").step.zero_grad()

    def optimizer_step(self) -> dict[str, float]:
        """Clip, update the weights and drop the gradients; or skip, if anything is not finite or nothing counted.

        A skipped step leaves weights and moments untouched and reports ``update_successful`` 0.
        """
        return self._ready("optimizer_step()").step.optimizer_step()

    def lr_scheduler_step(self) -> float:
        """Advance the schedule by one and return the learning rate of the next step. No collective."""
        return self._ready("lr_scheduler_step()").step.lr_scheduler_step()

    def shard_data(self, batch: SequenceBatch, mb_spec: MicroBatchSpec | None = None) -> SequenceBatch:
        """This rank's part of a batch that every rank holds in full. No collective.

        Where ``mb_spec`` shares prefixes, and the engine can, sequences that share are on one rank as far as the
        slowest rank gets no more to compute.
        """
        return batch.select(self._shard_plan(batch, mb_spec)[self.data_parallel_rank])

    def unshard_data(
        self, output: ModelOutput, batch: SequenceBatch, mb_spec: MicroBatchSpec | None = None
    ) -> ModelOutput:
        """The inverse for outputs, by the same ``mb_spec``: outputs of all ranks in the order of the full ``batch``."""
        return unshard_output(
            self.data_parallel_group.gather(output), batch, self._shard_plan(batch, mb_spec)
        )

    def _shard_plan(self, batch: SequenceBatch, mb_spec: MicroBatchSpec | None) -> list[list[int]]:
        return shard_plan(batch, self.data_parallel_size, guards.shares_prefixes(self.spec, mb_spec))

    # ------------------------------------------------------------------ state

    def hf_config(self) -> PretrainedConfig:
        """The transformers config of the model with its head. No collective."""
        return self.backend.hf_config()

    def named_tensors(self, kind: TensorKind) -> NamedTensors:
        """Stream parameter-shaped quantities in the Hugging Face layout; see `NamedTensors`.

        ``grads`` are there between ``forward_backward`` and ``optimizer_step``: reduced, normalised,
        not clipped. With an adapter (``model.lora``), ``params`` are the weights with the adapter merged
        into them. ``adapter`` is the adapter (and a value or reward head) under the names of ``peft``
        in float32; ``master`` has the base weights and the adapter separately.
        """
        return self._ready("named_tensors()").persistence.named_tensors(kind)

    def tensor_shapes(self, kind: TensorKind) -> dict[str, tuple[int, ...]]:
        """Names and full shapes of the tensors that `named_tensors` streams. No collective."""
        return self._parts.runtime.tensors.shapes(kind)

    def load_named_tensors(self, kind: TensorKind, source: TensorSource) -> None:
        """Set parameters, moments or buffers; `WeightsError` lists every name or shape that is off."""
        self._ready("load_named_tensors()").persistence.load_named_tensors(kind, source)

    def save(self, meta: SaveLoadMeta) -> None:
        """Write a checkpoint, atomically; `CheckpointError` leaves the previous checkpoint untouched.

        With ``meta.asynchronous`` it returns when the saved state can no longer change: each rank has copied
        its slices to host memory (a backend with a format of its own has written its files by then).
        Files, digests, flushing and the renaming into place follow while training continues.
        `wait_for_saves` waits for that, and so do the next ``save``, ``load`` and ``destroy``; whichever
        comes first raises what went wrong.
        """
        self._ready("save()").persistence.save(meta)

    def wait_for_saves(self) -> None:
        """Return when no save is in progress in the background.

        Raises one `CheckpointError` on all ranks if one failed on any of them; the checkpoint that was there
        before is untouched.
        """
        self._ready("wait_for_saves()").persistence.wait_for_saves()

    def load(self, meta: SaveLoadMeta) -> None:
        """Read a checkpoint, and drop the gradients; a damaged or foreign one is refused before anything changes."""
        self._ready("load()").persistence.load(meta)

    def upload_weights(self, meta: WeightUpdateMeta) -> None:
        """Send the weights to inference engines, which take them by ``update_weights(meta)``.

        ``lora`` sends the adapter alone (``model.lora``), and all others the weights with the adapter merged into
        them. By ``disk`` this comes first. By any other method the two run at one time: call ``update_weights``
        first, which returns at once, and this returns when the weights are installed. `sync_weights` does both.
        """
        self._ready("upload_weights()").persistence.upload_weights(meta)

    # --------------------------------------------------------------- progress

    @property
    def progress(self) -> EngineProgress:
        """Scheduler steps, updates and version."""
        return self._parts.step.progress

    def restore_progress(self, progress: EngineProgress) -> None:
        """Continue from ``progress``, as a checkpoint does. No collective."""
        self._parts.step.progress = replace(progress)

    def set_version(self, version: int) -> None:
        """Record the version that the driver gave to the weights. No collective."""
        self._parts.step.set_version(version)

    def get_version(self) -> int:
        """The version that the driver gave to the weights. No collective."""
        return self._parts.step.progress.version

    def get_scheduling_config(self) -> Scheduling:
        """Resources that one rank needs. No collective."""
        return self.backend.scheduling(self.config)
