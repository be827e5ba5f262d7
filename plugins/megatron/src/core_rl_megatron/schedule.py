"""`Schedule`: Megatron's pipeline schedules over packed micro-batches, with the core's step on the last stage.

`StageMessages` sends the shapes of activations between stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator, _p2p_ops
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from core_rl.backend.steps import MicroBatchStep
from core_rl.backend.train_backend import BuildContext
from core_rl.data.batch import SequenceBatch
from core_rl.data.outputs import ModelOutput
from core_rl.data.prefixes import PrefixTree
from core_rl.errors import BatchError, UnsupportedCapability
from core_rl.toolkit.heads import LanguageModelHead, PackedStates, scalar_outputs
from core_rl.toolkit.parallel_context import TokenSlice
from core_rl.toolkit.routers import Routing, own_routing
from core_rl_megatron.config import MegatronConfig
from core_rl_megatron.experts import routers_of, whole_outputs
from core_rl_megatron.model import StageModel
from core_rl_megatron.parallel_state import model_shards

GROUPS = ["tp", "cp", "embd", "pos_embd", "pp", "dp_cp"]
"""Process groups that a schedule takes."""
DIMENSIONS = 3
"""Number of dimensions of activations, ``[L, 1, H]``."""


class Schedule:
    """Runs the chunks of ``model``, of which ``wrapped`` accumulates the gradients."""

    def __init__(
        self, context: BuildContext[MegatronConfig], model: StageModel, wrapped: Sequence[nn.Module]
    ) -> None:
        self._layout = context.layout
        self._head = context.config.model.head
        self._model = model
        self._wrapped = list(wrapped)
        self.shards = model_shards(context.world, context.layout)
        self._messages = StageMessages(model.chunks[0].config, context.device)
        self._groups = ProcessGroupCollection.use_mpu_process_groups(GROUPS)

    def run(
        self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep, *, forward_only: bool
    ) -> None:
        """One pass; see `TrainBackend.run`."""
        requested = {"aux_loss", "routing"}.intersection(step.outputs)
        if self._layout.pp > 1 and (requested or any("routing" in batch.tokens for batch in micro_batches)):
            raise UnsupportedCapability(
                f"pp={self._layout.pp}: the last stage does not see the routers of the others, so it can neither "
                "balance (model.router_aux_coef), nor record, nor replay their choices; set pp to 1"
            )
        schedule = get_forward_backward_func()
        schedule(
            forward_step_func=partial(self._forward_step, step),
            data_iterator=[iter(micro_batches) for _ in self._wrapped],
            model=self._wrapped,
            num_microbatches=len(micro_batches),
            # Not used: shapes travel with the activations (`variable_seq_lengths`).
            seq_length=1,
            micro_batch_size=1,
            forward_only=forward_only,
            p2p_communicator=self._messages,
            pg_collection=self._groups,
        )
        self._messages.finish()
        self._forget_routings()

    def abort(self) -> None:
        """Drop recorded routings with their graphs, and messages between stages, after a failed pass."""
        self._forget_routings()
        self._messages.abandon()

    def _forget_routings(self) -> None:
        """Their graphs lead to the wrapper's hooks, and so to the model: a cycle that Python's collector can't see."""
        for chunk in self._model.chunks:
            for router in routers_of(chunk):
                router.recorded = router.replay = None

    def _forward_step(
        self, step: MicroBatchStep, micro_batches: Iterator[SequenceBatch], chunk: nn.Module
    ) -> tuple[Tensor, Any]:
        micro_batch = next(micro_batches)
        tree = PrefixTree.of(micro_batch) if step.share_prefixes else None
        tokens = self.shards.slice_of(micro_batch, tree)
        routers = routers_of(chunk)
        routing = own_routing(micro_batch, tokens)
        if routing is not None and routing.shape[1] != len(routers):
            raise BatchError(
                f"token field 'routing' is for {routing.shape[1]} layers; this "
                f"{self._model.hf_config.model_type!r} model has {len(routers)} with experts"
            )
        if routing is not None and self._layout.sequence_parallel:
            routing = routing.chunk(self._layout.tp)[self.shards.tensor.rank]
        for layer, router in enumerate(routers):
            router.replay = None if routing is None else routing[:, layer]
        hidden: Tensor = chunk(tokens, self.shards.context, micro_batch)
        routings = [router.recorded for router in routers if router.recorded is not None]
        return hidden, partial(self._loss, step, micro_batch, tokens, routings)

    def _loss(
        self,
        step: MicroBatchStep,
        micro_batch: SequenceBatch,
        tokens: TokenSlice,
        routings: Sequence[Routing],
        hidden: Tensor,
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The loss function of Megatron's schedule, over the output of the last stage.

        The gradient is that of the loss that `step` returns, times exactly 1. Three places could scale it:
        schedules.py divides by the number of tokens and of micro-batches unless
        ``calculate_per_token_loss``, which is on; DistributedDataParallel then leaves its factor
        1 / (data and context parallel ranks) out and adds up (``gradient_scaling_factor = 1.0``); and
        `finalize_model_grads` divides by a number of tokens if it gets one, and gets none.
        """
        last = self._model.chunks[-1]
        states = PackedStates(hidden.squeeze(1), tokens, micro_batch, self.shards)
        if self._head == "lm":
            head, weight = LanguageModelHead(vocab_size=last.true_vocab_size), last.head_weight()
            outputs = head.outputs(states, weight, None, step.outputs, step.temperature, step.trained_only)
        else:
            outputs = scalar_outputs(states, last.output_layer, self._head)
        if "aux_loss" in step.outputs or "routing" in step.outputs:
            family = self._model.hf_config.model_type
            outputs |= whole_outputs(routings, self.shards, tokens, micro_batch, step.outputs, family)
        loss = step(ModelOutput(**outputs), micro_batch)
        return loss, torch.tensor(1, dtype=torch.int), {}


class StageMessages(P2PCommunicator):  # type: ignore[misc]
    """Exchanges the shapes of activations in the order in which Megatron exchanges the activations; on CUDA as Megatron
    does.

    Megatron sends shapes to both neighbours in one batch (p2p_communication.py: ``_communicate_shapes``).
    In an interleaved pipeline of two stages these are one and the same rank, which then takes the shape of
    an activation for that of a gradient. And it waits until the shapes that it sends are received, which
    on gloo may never be: the neighbour may first have to hand over an activation.
    """

    def __init__(self, config: TransformerConfig, device: torch.device) -> None:
        super().__init__(mpu.get_pipeline_model_parallel_group(), config)
        self._device = device
        self._under_way: list[tuple[Any, Tensor | None]] = []
        """Shapes that were sent, in memory that must stay until they are received."""

    def finish(self) -> None:
        """Return when everything that was sent has been received."""
        for request, _ in self._under_way:
            request.wait()
        self._under_way.clear()

    def abandon(self) -> None:
        """Forget sent messages, after a failed pass."""
        self._under_way.clear()

    def _communicate_shapes(
        self,
        tensor_send_next: Tensor | None,
        tensor_send_prev: Tensor | None,
        recv_prev: bool,
        recv_next: bool,
    ) -> tuple[list[int], list[int]]:
        if self._device.type == "cuda":
            shapes: tuple[list[int], list[int]] = super()._communicate_shapes(
                tensor_send_next, tensor_send_prev, recv_prev, recv_next
            )
            return shapes
        # A shape that is not received stays 0, as Megatron's own does.
        from_prev, from_next = torch.zeros((2, DIMENSIONS), dtype=torch.int64, device=self._device)
        to_prev, to_next = self._shape(tensor_send_prev), self._shape(tensor_send_next)
        requests = _p2p_ops(
            tensor_send_prev=to_prev,
            tensor_recv_prev=from_prev if recv_prev else None,
            tensor_send_next=to_next,
            tensor_recv_next=from_next if recv_next else None,
            group=self.pp_group,
            prev_pipeline_rank=self.prev_rank,
            next_pipeline_rank=self.next_rank,
        )
        sent = {"send_prev": to_prev, "send_next": to_next}
        self._under_way += [(requests.pop(name), shape) for name, shape in sent.items() if name in requests]
        for request in requests.values():
            request.wait()
        return from_prev.tolist(), from_next.tolist()

    def _shape(self, value: Tensor | None) -> Tensor | None:
        return None if value is None else torch.tensor(value.shape, dtype=torch.int64, device=self._device)
