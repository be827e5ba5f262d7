"""`EngineGroup`: the ranks of one train engine, driven from one process as if they were one engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from core_rl.backend.loss import LossSpec
from core_rl.backend.meta import EngineProgress, SaveLoadMeta, Scheduling, TensorKind, WeightUpdateMeta
from core_rl.backend.steps import PostHook
from core_rl.backend.tensors import TensorSource
from core_rl.data.batch import SequenceBatch
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.data.outputs import OutputName
from core_rl.data.partition import shard_plan, unshard_output
from core_rl.engine.passes import AggregateFn
from core_rl.engine.train import TrainEngine
from core_rl.errors import BatchError, GroupError, LossError
from core_rl.launch import remote
from core_rl.launch.ranks import ArgTs, EngineRanks, ResultT

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["EngineGroup"]


class EngineGroup(EngineRanks):
    """The ranks of one train engine, each in a process of its own, behind the engine's public methods.

    A batch is split over the data-parallel ranks, and results come back merged in the caller's
    order; `run` calls any function on every rank. What travels is pickled: losses, hooks and
    functions belong to an importable module, and a script that starts a group keeps its main part
    under ``if __name__ == "__main__":``. Use the group as a context manager, or `close` it. It takes
    one call at a time.

    ``EngineGroup("fsdp", model={"path": "my-model"}, layout={"dp": 2})`` takes an engine by name or spec, and its
    config as ``config`` or as fields: config objects or plain values, with the defaults of the engine's
    config class. ``optimizer=None`` builds an engine that only runs forward. ``model["path"]`` may be a
    model on the Hugging Face Hub. The constructor starts ``layout.world_size`` ranks and checks the config;
    entering the context builds the engine with ``ft_spec``, and so does `initialize`.

    ``timeout_s`` limits each call. ``threads_per_rank`` is for kernels on the CPU; by default the ranks
    share the cores equally. ``devices`` are the numbers of the accelerators, one for each rank; by default
    those from 0 on.

    When a rank fails, its error is raised here: the same type if it is one of `core_rl.errors`, with
    the rank and its traceback in a note, else `RankFailed`. A rank that ends raises `RankDied`, one
    that does not answer within ``timeout_s`` seconds `RankTimeout`. After an error that every rank
    has answered the group can be used again. After any other, and after Ctrl-C inside a call, the group has
    ended: no process is left, and calls raise `GroupError` until `restart`.

    ``colocate_with=group`` starts no processes: the engine lives in those of another group, in the same
    world of the same number of ranks, and computes what it would compute alone. Colocated groups take one
    call at a time together. A rank that ends, ends them all, each with the same error. The processes end when
    the last of the groups is closed, and `restart` replaces them for all.
    """

    # -------------------------------------------------------------- training

    def train_batch(self, batch: SequenceBatch, loss: LossSpec, mb_spec: MicroBatchSpec) -> dict[str, float]:
        """One optimizer step; see `TrainEngine.train_batch`."""
        return self._on_parts(TrainEngine.train_batch, batch, loss, mb_spec)

    def forward_backward(
        self,
        batch: SequenceBatch,
        loss: LossSpec,
        mb_spec: MicroBatchSpec,
        forward_only: bool = False,
        total_weight: float | None = None,
        total_tokens: int | None = None,
    ) -> dict[str, float]:
        """Accumulate gradients; see `TrainEngine.forward_backward`.

        ``total_weight`` and ``total_tokens`` are those of all calls of one step, over whole batches. The
        first needs a loss of ``normalize_scope="global"``, since it would differ from rank to rank for ``"dp"``.
        """
        if total_weight is not None and loss.normalize_scope != "global":
            raise LossError(
                f"total_weight through a group needs normalize_scope='global', not {loss.normalize_scope!r}; "
                "use run_each() to give each rank its own"
            )
        return self._on_parts(
            TrainEngine.forward_backward, batch, loss, mb_spec, forward_only, total_weight, total_tokens
        )

    def eval_batch(self, batch: SequenceBatch, loss: LossSpec, mb_spec: MicroBatchSpec) -> dict[str, float]:
        """The loss and its metrics without gradients; see `TrainEngine.eval_batch`."""
        return self._on_parts(TrainEngine.eval_batch, batch, loss, mb_spec)

    def optimizer_zero_grad(self) -> None:
        """Drop the accumulated gradients."""
        self._on_all(TrainEngine.optimizer_zero_grad)

    def optimizer_step(self) -> dict[str, float]:
        """Clip and update, or skip; see `TrainEngine.optimizer_step`."""
        return self._on_all(TrainEngine.optimizer_step)

    def lr_scheduler_step(self) -> float:
        """Advance the schedule by one; the learning rate of the next step."""
        return self._on_all(TrainEngine.lr_scheduler_step)

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
        """Outputs in the order of ``batch``; see `TrainEngine.forward`. ``aggregate_fn`` runs in the driver."""
        if output_seqlens is not None and len(output_seqlens) != batch.num_sequences:
            raise BatchError(
                f"output_seqlens has {len(output_seqlens)} entries for {batch.num_sequences} sequences; "
                "give one length for each"
            )
        plan = shard_plan(batch, self.data_parallel_size)
        calls = []
        for indices, part in zip(plan, batch.split(plan), strict=True):
            lengths = None if output_seqlens is None else [output_seqlens[index] for index in indices]
            calls.append((part, mb_spec, outputs, temperature, lengths, post_hook))
        results = self._call_parts("forward", remote.forward, calls, plan)
        if post_hook is None:
            return unshard_output(results, batch, plan)
        rows: dict[int, Tensor] = {}
        for indices, own in zip(plan, results, strict=True):
            if indices:
                rows.update(zip(indices, own, strict=True))
        return (aggregate_fn or torch.cat)([rows[index] for index in range(batch.num_sequences)])

    # ----------------------------------------------------------------- state

    def hf_config(self) -> PretrainedConfig:
        """The transformers config of the model with its head."""
        return self._on_all(TrainEngine.hf_config)

    def named_tensors(self, kind: TensorKind) -> dict[str, Tensor]:
        """All tensors of ``kind`` in full on the CPU: for models that fit into this process.

        To stream them in bounded memory, iterate `TrainEngine.named_tensors` in a function for `run`.
        """
        gathered = self.run(remote.gather_tensors, kind)
        return next(found for found in gathered if found is not None)

    def tensor_shapes(self, kind: TensorKind) -> dict[str, tuple[int, ...]]:
        """Names and full shapes of what `named_tensors` returns."""
        return self._on_all(TrainEngine.tensor_shapes, kind)

    def load_named_tensors(self, kind: TensorKind, source: TensorSource) -> None:
        """Set parameters, moments or buffers; ``source`` is pickled for each rank."""
        self._on_all(TrainEngine.load_named_tensors, kind, source)

    def save(self, meta: SaveLoadMeta) -> None:
        """Write a checkpoint; see `TrainEngine.save`."""
        self._on_all(TrainEngine.save, meta)

    def wait_for_saves(self) -> None:
        """Wait for saves in the background; see `TrainEngine.wait_for_saves`."""
        self._on_all(TrainEngine.wait_for_saves)

    def load(self, meta: SaveLoadMeta) -> None:
        """Read a checkpoint; see `TrainEngine.load`."""
        self._on_all(TrainEngine.load, meta)

    def upload_weights(self, meta: WeightUpdateMeta) -> None:
        """Send the weights to inference engines; see `TrainEngine.upload_weights`."""
        self._on_all(TrainEngine.upload_weights, meta)

    @property
    def progress(self) -> EngineProgress:
        """Scheduler steps, updates and version."""
        first: EngineProgress = self.run(attrgetter("progress"))[0]
        return first

    def restore_progress(self, progress: EngineProgress) -> None:
        """Continue from ``progress``; see `TrainEngine.restore_progress`."""
        self._on_all(TrainEngine.restore_progress, progress)

    def set_version(self, version: int) -> None:
        """Record the version that the driver gave to the weights."""
        self._on_all(TrainEngine.set_version, version)

    def get_version(self) -> int:
        """The version that the driver gave to the weights."""
        return self._on_all(TrainEngine.get_version)

    def get_scheduling_config(self) -> Scheduling:
        """Resources that one rank needs."""
        return self._on_all(TrainEngine.get_scheduling_config)

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """The base model on all ranks inside the context; see `TrainEngine.disable_adapter`."""
        was_on = self._on_all(TrainEngine.switch_adapter, False)
        try:
            yield
        except BaseException:
            with suppress(GroupError):  # the error that ended the group counts
                self._on_all(TrainEngine.switch_adapter, was_on)
            raise
        self._on_all(TrainEngine.switch_adapter, was_on)

    def to(self, device: torch.device | str, model: bool = True, optimizer: bool = True) -> None:
        """Move weights and gradients, and moments, to ``device``; see `TrainEngine.to`."""
        self._on_all(TrainEngine.to, device, model, optimizer)

    def onload(self) -> None:
        """Bring everything back to the engine's device."""
        self._on_all(TrainEngine.onload)

    def offload(self) -> None:
        """Move everything to host memory until `onload` or the next call that needs it."""
        self._on_all(TrainEngine.offload)

    # -------------------------------------------------------------- plumbing

    def _on_all(self, method: Callable[[TrainEngine, *ArgTs], ResultT], *args: *ArgTs) -> ResultT:
        """The engine's ``method(*args)`` on every rank; the first rank's result."""
        name, per_rank = method.__name__, [args] * len(self.rank_infos())
        first: ResultT = self.call_ranks(name, partial(remote.call_method, name), per_rank)[0]
        return first

    def _on_parts(
        self, method: Callable[..., dict[str, float]], batch: SequenceBatch, *args: object
    ) -> dict[str, float]:
        """The engine's ``method(part, *args)`` on every rank with its part of ``batch``; the metrics."""
        name, plan = method.__name__, shard_plan(batch, self.data_parallel_size)
        calls = [(part, *args) for part in batch.split(plan)]
        metrics: dict[str, float] = self._call_parts(name, partial(remote.call_method, name), calls, plan)[0]
        return metrics

    def _call_parts(
        self,
        name: str,
        fn: Callable[..., Any],
        calls: Sequence[tuple[object, ...]],
        plan: Sequence[Sequence[int]],
    ) -> list[Any]:
        """``fn`` with ``calls[i]`` on the ranks of data-parallel rank ``i``; the result of its output rank."""
        infos = self.rank_infos()
        try:
            results = self.call_ranks(name, fn, [calls[info.data_parallel_rank] for info in infos])
        except BatchError as error:
            if len(plan) > 1:
                parts = "; ".join(f"rank {number} has {list(part)}" for number, part in enumerate(plan))
                error.add_note(
                    f"Sequences are numbered within the parts of the data-parallel ranks: {parts}."
                )
            raise
        by_part = {i.data_parallel_rank: r for i, r in zip(infos, results, strict=True) if i.is_output_rank}
        return [by_part[number] for number in range(len(plan))]
