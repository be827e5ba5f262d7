"""`EngineGroup`: the ranks of one train engine, driven from one process as if they were one engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from core_rl.backend.loss import LossSpec
from core_rl.backend.meta import SaveLoadMeta, Scheduling, TensorKind, WeightUpdateMeta
from core_rl.backend.progress import EngineProgress
from core_rl.backend.steps import PostHook
from core_rl.backend.tensors import TensorSource
from core_rl.data.batch import SequenceBatch
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.data.outputs import OutputName
from core_rl.data.shard import shard_plan, unshard_output
from core_rl.engine.post_hook import AggregateFn
from core_rl.errors import BatchError, GroupError, LossError
from core_rl.launch import remote
from core_rl.launch.ranks import EngineRanks

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

    When a rank fails, its error is raised here: the same type if it is one of `core_rl.errors`, with
    the rank and its traceback in a note, else `RankFailed`. A rank that ends raises `RankDied`, one
    that does not answer within ``timeout_s`` seconds `RankTimeout`. After an error that every rank
    has answered the group goes on. After any other, and after Ctrl-C inside a call, the group has
    ended: no process is left, and calls raise `GroupError` until `restart`.

    ``EngineGroup(spec, config)`` starts ``config.layout.world_size`` ranks and has the engine check
    ``config``; `initialize` builds it. ``threads_per_rank`` is for kernels on the CPU; by default
    the ranks share the cores equally. ``devices`` are the numbers of the accelerators, one for each rank;
    by default those from 0 on.

    ``beside=group`` starts no processes: the engine lives in those of another group, in the same world of the
    same number of ranks, where it computes what it would compute alone. All groups of the processes take one
    call at a time together. A rank that ends, ends them all, each with the same error; the processes end when the
    last of them is closed, and `restart` replaces them for all.
    """

    # -------------------------------------------------------------- training

    def train_batch(self, batch: SequenceBatch, loss: LossSpec, mb_spec: MicroBatchSpec) -> dict[str, float]:
        """One optimizer step; see `TrainEngine.train_batch`."""
        return self._on_parts("train_batch", batch, loss, mb_spec)

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
            "forward_backward", batch, loss, mb_spec, forward_only, total_weight, total_tokens
        )

    def eval_batch(self, batch: SequenceBatch, loss: LossSpec, mb_spec: MicroBatchSpec) -> dict[str, float]:
        """The loss and its metrics without gradients; see `TrainEngine.eval_batch`."""
        return self._on_parts("eval_batch", batch, loss, mb_spec)

    def optimizer_zero_grad(self) -> None:
        """Drop what has accumulated."""
        self._on_all("optimizer_zero_grad")

    def optimizer_step(self) -> dict[str, float]:
        """Clip and update, or skip; see `TrainEngine.optimizer_step`."""
        metrics: dict[str, float] = self._on_all("optimizer_step")
        return metrics

    def lr_scheduler_step(self) -> float:
        """Advance the schedule by one; the learning rate of the next step."""
        return float(self._on_all("lr_scheduler_step"))

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
        config: PretrainedConfig = self._on_all("hf_config")
        return config

    def named_tensors(self, kind: TensorKind) -> dict[str, Tensor]:
        """All tensors of ``kind`` in full on the CPU: for models that fit into this process.

        To stream them in bounded memory, iterate `TrainEngine.named_tensors` in a function for `run`.
        """
        gathered = self._call("named_tensors", remote.gather_tensors, [(kind,)] * len(self._ready()))
        tensors: dict[str, Tensor] = next(found for found in gathered if found is not None)
        return tensors

    def tensor_shapes(self, kind: TensorKind) -> dict[str, tuple[int, ...]]:
        """Names and full shapes of what `named_tensors` returns."""
        shapes: dict[str, tuple[int, ...]] = self._on_all("tensor_shapes", kind)
        return shapes

    def load_named_tensors(self, kind: TensorKind, source: TensorSource) -> None:
        """Set parameters, moments or buffers; ``source`` is pickled for each rank."""
        self._on_all("load_named_tensors", kind, source)

    def save(self, meta: SaveLoadMeta) -> None:
        """Write a checkpoint; see `TrainEngine.save`."""
        self._on_all("save", meta)

    def wait_for_saves(self) -> None:
        """Return when no save is going on in the background; see `TrainEngine.wait_for_saves`."""
        self._on_all("wait_for_saves")

    def load(self, meta: SaveLoadMeta) -> None:
        """Read a checkpoint; see `TrainEngine.load`."""
        self._on_all("load", meta)

    def upload_weights(self, meta: WeightUpdateMeta) -> None:
        """Send the weights to inference engines; see `TrainEngine.upload_weights`."""
        self._on_all("upload_weights", meta)

    @property
    def progress(self) -> EngineProgress:
        """Scheduler steps, updates and version."""
        progress: EngineProgress = self._call("progress", remote.progress, [()] * len(self._ready()))[0]
        return progress

    def restore_progress(self, progress: EngineProgress) -> None:
        """Go on from ``progress``; see `TrainEngine.restore_progress`."""
        self._on_all("restore_progress", progress)

    def set_version(self, version: int) -> None:
        """Record the version that the driver gave to the weights."""
        self._on_all("set_version", version)

    def get_version(self) -> int:
        """The version that the driver gave to the weights."""
        return int(self._on_all("get_version"))

    def get_scheduling_config(self) -> Scheduling:
        """Resources that one rank needs."""
        scheduling: Scheduling = self._on_all("get_scheduling_config")
        return scheduling

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """The base model on all ranks inside the context; see `TrainEngine.disable_adapter`."""
        was_on: bool = self._on_all("_switch_adapter", False)
        try:
            yield
        except BaseException:
            with suppress(GroupError):  # where the group has ended, what ended it is what counts
                self._on_all("_switch_adapter", was_on)
            raise
        self._on_all("_switch_adapter", was_on)

    def to(self, device: torch.device | str, model: bool = True, optimizer: bool = True) -> None:
        """Move weights and gradients, and moments, to ``device``; see `TrainEngine.to`."""
        self._on_all("to", device, model, optimizer)

    def onload(self) -> None:
        """Bring everything back to the engine's device."""
        self._on_all("onload")

    def offload(self) -> None:
        """Move everything to host memory until `onload` or the next call that needs it."""
        self._on_all("offload")

    # -------------------------------------------------------------- plumbing

    def _on_all(self, method: str, *args: object) -> Any:
        """The engine's ``method(*args)`` on every rank; the first rank's result."""
        return self._call(method, remote.call_method, [(method, *args)] * len(self._ready()))[0]

    def _on_parts(self, method: str, batch: SequenceBatch, *args: object) -> dict[str, float]:
        """The engine's ``method(part, *args)`` on every rank with its part of ``batch``; the metrics."""
        plan = shard_plan(batch, self.data_parallel_size)
        calls = [(method, part, *args) for part in batch.split(plan)]
        metrics: dict[str, float] = self._call_parts(method, remote.call_method, calls, plan)[0]
        return metrics

    def _call_parts(
        self,
        name: str,
        fn: Callable[..., Any],
        calls: Sequence[tuple[object, ...]],
        plan: Sequence[Sequence[int]],
    ) -> list[Any]:
        """``fn`` with ``calls[i]`` on the ranks of data-parallel rank ``i``; what its output rank returned."""
        places = self._ready()
        try:
            results = self._call(name, fn, [calls[place.data_parallel_rank] for place in places])
        except BatchError as error:
            if len(plan) > 1:
                parts = "; ".join(f"rank {number} has {list(part)}" for number, part in enumerate(plan))
                error.add_note(
                    f"Sequences are numbered within the parts of the data-parallel ranks: {parts}."
                )
            raise
        by_part = {p.data_parallel_rank: r for p, r in zip(places, results, strict=True) if p.is_output_rank}
        return [by_part[number] for number in range(len(plan))]
