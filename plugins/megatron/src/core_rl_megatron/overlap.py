"""`Buckets`: gradients that are added up, and weights that are gathered, while Megatron's chunks compute.

Megatron starts a collective for a bucket when all of its gradients are there, and one for the weights of a bucket when
the bucket before is needed. What is under way is finished here before anything else reads the memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from megatron.core.distributed import DistributedDataParallel
from torch import nn

__all__ = ["Buckets"]


class Buckets:
    """The buckets of ``chunks``, of those that Megatron's DistributedDataParallel wraps."""

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        self._chunks: list[Any] = [chunk for chunk in chunks if isinstance(chunk, DistributedDataParallel)]
        self._groups: list[Any] = [
            group
            for chunk in self._chunks
            for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)
        ]
        for group in self._groups:
            # Megatron counts in its first step how often each gradient comes, which a pass that fails would spoil.
            group.golden_per_param_grad_ready_counts = dict.fromkeys(group.params, 1)
            group.is_first_batch = False
        # The head is no module that is called: its weights are read after the layers.
        self._hooks = [
            chunk.module.register_forward_hook(lambda *_: self.gather())
            for chunk in self._chunks
            if chunk.use_forward_hook
        ]

    @contextmanager
    def reducing(self, *, last: bool) -> Iterator[None]:
        """A pass. In the last micro-batch of the ``last`` pass of a step, gradients are added up over ranks."""
        functions = [chunk.no_sync for chunk in self._chunks]
        with ExitStack() as stack:
            if not last:
                for function in functions:
                    stack.enter_context(function())
            elif functions:
                # For all but the last micro-batch. Schedules take a list where a rank has several chunks.
                config = self._chunks[0].config
                config.no_sync_func = functions if len(functions) > 1 else functions[0]
                stack.callback(setattr, config, "no_sync_func", None)
            yield

    def reduce(self) -> None:
        """Start what no pass has started; `finalize_model_grads` waits for all. Collective."""
        for group in self._groups:
            if group.ddp_config.overlap_grad_reduce and group.grad_reduce_handle is None:
                group.start_grad_sync()

    def forget_weights(self) -> None:
        """They have changed on the ranks that own them, and are gathered when they are needed."""
        for group in self._groups:
            group.param_gather_dispatched = False

    def gather(self) -> None:
        """Weights that are not here yet. Collective."""
        for group in self._groups:
            here = group.param_gather_dispatched and group.param_gather_handle is None
            if group.ddp_config.overlap_param_gather and not here:
                group.start_param_sync(force_sync=True)

    def wait(self) -> None:
        """Until gradients that are being added up are no longer written."""
        for group in self._groups:
            if group.grad_reduce_handle is not None:
                group.grad_reduce_handle.wait()

    def forget_gradients(self) -> None:
        """Those that a pass left, and what it began with them."""
        self.wait()
        for group in self._groups:
            group.grad_reduce_handle = None

    def abandon(self) -> None:
        """Forget what a failed pass began. A lone rank waits for it; others may never come to it."""
        for group in self._groups:
            for handle in (group.grad_reduce_handle, group.param_gather_handle):
                if handle is not None and _is_alone(group):
                    handle.wait()
            group.grad_reduce_handle = group.param_gather_handle = None
            group.per_param_grad_ready_counts = {}
        self.forget_weights()

    def close(self) -> None:
        """Drop the hooks, which hold the chunks."""
        for hook in self._hooks:
            hook.remove()
        for chunk in self._chunks:
            if chunk.use_forward_hook:
                chunk.disable_forward_pre_hook(param_sync=False)


def _is_alone(group: Any) -> bool:
    """Whether no other rank has the bucket."""
    spread = group.ddp_config.use_distributed_optimizer
    ranks = group.intra_distributed_optimizer_instance_group if spread else group.data_parallel_group
    return bool(ranks.size() == 1)
