"""`EngineGroup`: the ranks of one train engine, driven from one process as if they were one engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from inspect import signature
from operator import attrgetter
from typing import Any, Concatenate, ParamSpec

import torch
from torch import Tensor

from core_rl.backend.loss import LossSpec
from core_rl.backend.meta import EngineProgress, TensorKind
from core_rl.backend.steps import AggregateFn, PostHook
from core_rl.data.batch import LOSS_MASK, SequenceBatch
from core_rl.data.micro_batch import MicroBatchSpec, shard_plan, unshard_output, unshard_rows
from core_rl.data.outputs import OutputName
from core_rl.engine.guards import check_output_seqlens, shares_prefixes
from core_rl.engine.train import TrainEngine
from core_rl.errors import BatchError, GroupError, LossError
from core_rl.launch.messages import Call, cut
from core_rl.launch.ranks import EngineRanks, ResultT
from core_rl.launch.remote import gather_tensors

P = ParamSpec("P")
FORWARD_FIELDS = (LOSS_MASK, "routing")
"""Fields that a forward pass may look at, besides ids and bounds; a hook may want any."""


def _on_all_ranks(
    method: Callable[Concatenate[TrainEngine, P], ResultT],
) -> Callable[Concatenate[EngineRanks, P], ResultT]:
    """A method of the group that calls the engine's ``method`` on every rank, and returns the first rank's result."""
    expected = signature(method)

    @wraps(method)
    def call(group: EngineRanks, /, *args: P.args, **kwargs: P.kwargs) -> ResultT:
        bound = expected.bind(
            group, *args, **kwargs
        )  # wrong arguments are a TypeError here, not on the ranks
        bound.apply_defaults()
        first: ResultT = group.call_ranks(method.__name__, *bound.args[1:])[0]
        return first

    return call


class EngineGroup(EngineRanks):
    """The ranks of one train engine, each in a process of its own, behind the engine's public methods.

    A batch is split over the data-parallel ranks, and results come back merged in the caller's
    order; `run` calls any function on every rank. What travels is pickled: losses, hooks, tensor
    sources and functions belong to an importable module, and a script that starts a group keeps its main part
    under ``if __name__ == "__main__":``. Use the group as a context manager, or `close` it. It takes
    one call at a time.

    ``EngineGroup("fsdp", model={"path": "my-model"}, layout={"dp": 2})`` takes an engine by name or spec, and its
    config as ``config`` or as fields: config objects or plain values, with the defaults of the engine's
    config class. ``optimizer=None`` builds an engine that only runs forward. ``model["path"]`` may be a
    model on the Hugging Face Hub. The constructor starts ``layout.world_size`` ranks and checks the config;
    entering the context builds the engine with ``ft_spec``, and so does `initialize`.

    ``timeout_s`` limits each call. ``threads_per_rank`` is for kernels on the CPU; by default the ranks
    share the cores equally. ``devices`` are the numbers of the accelerators, one for each rank; by default
    from 0 on.

    ``hosts`` start the ranks, by default `LocalHosts` on this machine. With several machines, ranks fill ``machines``
    in turn, by default all in order, and ``devices`` are numbered on each machine.

    When a rank fails, its error is raised here: the same type for errors of `core_rl.errors`, with
    the rank and its traceback in a note, else `RankFailed`. A rank that ends raises `RankDied`, one
    that does not answer within ``timeout_s`` seconds `RankTimeout`. After an error that every rank
    has answered the group can be used again. After any other, and after Ctrl-C inside a call, the group has
    ended: no process is left, and calls raise `GroupError` until `restart`.

    ``colocate_with=group`` starts no processes: the engine lives in the processes of another group, in the
    same world of the same number of ranks, and computes as if it were alone. Colocated groups take one
    call at a time together. A rank that ends, ends them all, each with the same error. The processes end when
    the last of the groups is closed, and `restart` replaces them for all.

    Methods such as ``save = _on_all_ranks(TrainEngine.save)`` have the arguments of `TrainEngine`.
    """

    # ---------------------------------- methods of the engine, on all ranks alike

    optimizer_zero_grad = _on_all_ranks(TrainEngine.optimizer_zero_grad)
    optimizer_step = _on_all_ranks(TrainEngine.optimizer_step)
    lr_scheduler_step = _on_all_ranks(TrainEngine.lr_scheduler_step)
    hf_config = _on_all_ranks(TrainEngine.hf_config)
    tensor_shapes = _on_all_ranks(TrainEngine.tensor_shapes)
    load_named_tensors = _on_all_ranks(TrainEngine.load_named_tensors)
    save = _on_all_ranks(TrainEngine.save)
    wait_for_saves = _on_all_ranks(TrainEngine.wait_for_saves)
    load = _on_all_ranks(TrainEngine.load)
    upload_weights = _on_all_ranks(TrainEngine.upload_weights)
    restore_progress = _on_all_ranks(TrainEngine.restore_progress)
    set_version = _on_all_ranks(TrainEngine.set_version)
    get_version = _on_all_ranks(TrainEngine.get_version)
    get_scheduling_config = _on_all_ranks(TrainEngine.get_scheduling_config)
    to = _on_all_ranks(TrainEngine.to)
    onload = _on_all_ranks(TrainEngine.onload)
    offload = _on_all_ranks(TrainEngine.offload)
    _switch_adapter = _on_all_ranks(TrainEngine.switch_adapter)

    # ---------------------------------------------------------- parts of a batch

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

        ``total_weight`` and ``total_tokens`` cover all calls of one step, over whole batches. The
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
        check_output_seqlens(output_seqlens, batch)
        plan = shard_plan(batch, self.data_parallel_size, shares_prefixes(self.spec, mb_spec))
        sent = batch.only(FORWARD_FIELDS) if post_hook is None else batch
        calls = []
        for indices, part in zip(plan, cut(sent, plan), strict=True):
            lengths = None if output_seqlens is None else [output_seqlens[index] for index in indices]
            calls.append((part, lengths))
        results = self._call_parts("forward", calls, plan, mb_spec, outputs, temperature, post_hook)
        if post_hook is None:
            return unshard_output(results, batch, plan)
        return (aggregate_fn or torch.cat)(unshard_rows(results, plan))

    # ----------------------------------------------------------------- state

    def named_tensors(self, kind: TensorKind) -> dict[str, Tensor]:
        """All tensors of ``kind`` in full on the CPU: for models that fit into this process.

        To stream them in bounded memory, iterate `TrainEngine.named_tensors` in a function for `run`.
        """
        gathered = self.run(gather_tensors, kind)
        return next(tensors for tensors in gathered if tensors is not None)

    @property
    def progress(self) -> EngineProgress:
        """Scheduler steps, updates and version."""
        first: EngineProgress = self.run(attrgetter("progress"))[0]
        return first

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """The base model on all ranks inside the context; see `TrainEngine.disable_adapter`."""
        was_on = self._switch_adapter(False)
        try:
            yield
        except BaseException:
            with suppress(GroupError):  # the error that ended the group counts
                self._switch_adapter(was_on)
            raise
        self._switch_adapter(was_on)

    @property
    def shares_prefixes(self) -> bool:
        """Whether ``MicroBatchSpec.share_prefixes`` saves work; see `TrainEngine.shares_prefixes`."""
        return all(self.run(attrgetter("shares_prefixes")))

    # -------------------------------------------------------------- plumbing

    def _on_parts(
        self, method: str, batch: SequenceBatch, loss: LossSpec, mb_spec: MicroBatchSpec, *arguments: object
    ) -> dict[str, float]:
        """The engine's ``method`` on every rank with its part of ``batch``; the metrics."""
        infos = self.rank_set.ready_engine(self.engine_id, self.spec.name)
        plan = shard_plan(batch, infos[0].data_parallel_size, shares_prefixes(self.spec, mb_spec))
        calls = [(part,) for part in cut(batch, plan)]
        metrics: dict[str, float] = self._call_parts(method, calls, plan, loss, mb_spec, *arguments)[0]
        return metrics

    def _call_parts(
        self,
        method: str,
        calls: Sequence[tuple[object, ...]],
        plan: Sequence[Sequence[int]],
        *arguments: object,
    ) -> list[Any]:
        """``method(*calls[i], *arguments)`` on the ranks of data-parallel rank ``i``; its output rank's result."""
        infos = self.rank_set.ready_engine(self.engine_id, self.spec.name)
        call = Call(self.engine_id, method, arguments)
        per_rank = [calls[info.data_parallel_rank] for info in infos]
        try:
            results = self.rank_set.pool.call(call, per_rank, self.timeout_s)
        except BatchError as error:
            if len(plan) > 1:
                parts = "; ".join(f"rank {number} has {list(part)}" for number, part in enumerate(plan))
                error.add_note(
                    f"Sequences are numbered within the parts of the data-parallel ranks: {parts}."
                )
            raise
        by_part = {i.data_parallel_rank: r for i, r in zip(infos, results, strict=True) if i.is_output_rank}
        return [by_part[number] for number in range(len(plan))]
