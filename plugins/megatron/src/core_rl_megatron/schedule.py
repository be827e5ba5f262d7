"""`Schedule`: Megatron's pipeline schedules over packed micro-batches, with the core's step on the last stage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from core_rl.backend.steps import MicroBatchStep
from core_rl.backend.train_backend import BuildContext
from core_rl.data.batch import SequenceBatch
from core_rl.data.outputs import ModelOutput
from core_rl.errors import BatchError, UnsupportedCapability
from core_rl.toolkit.heads import LanguageModelHead, PackedStates, scalar_outputs
from core_rl.toolkit.parallel_context import ModelShards, TokenSlice
from core_rl.toolkit.routers import Routing, own_routing
from core_rl_megatron.config import MegatronConfig
from core_rl_megatron.experts import PackedRouter, routers_of, whole_outputs
from core_rl_megatron.model import StageModel
from core_rl_megatron.pipeline import schedule_groups

__all__ = ["Schedule"]


class Schedule:
    """Runs the chunks of ``model``, of which ``wrapped`` accumulates the gradients."""

    def __init__(
        self,
        context: BuildContext[MegatronConfig],
        model: StageModel,
        wrapped: Sequence[nn.Module],
        shards: ModelShards,
    ) -> None:
        self._layout = context.layout
        self._head = context.config.model.head
        self._model = model
        self._wrapped = list(wrapped)
        self._shards = shards
        pipelined = context.layout.pp > 1
        self._pipeline = schedule_groups(model.config, context.device) if pipelined else None

    def run(
        self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep, *, forward_only: bool
    ) -> None:
        """One pass; see `TrainBackend.run`."""
        self._check_routing(micro_batches, step)
        schedule = get_forward_backward_func()
        pipeline: dict[str, Any] = {} if self._pipeline is None else {**self._pipeline}
        schedule(
            forward_step_func=partial(self._forward_step, step),
            data_iterator=[iter(micro_batches) for _ in self._wrapped],
            model=self._wrapped,
            num_microbatches=len(micro_batches),
            # Not used: shapes travel with the activations (`variable_seq_lengths`).
            seq_length=1,
            micro_batch_size=1,
            forward_only=forward_only,
            **pipeline,
        )
        if self._pipeline is not None:
            self._pipeline["p2p_communicator"].finish()

    def abort(self) -> None:
        """Drop what a failed pass left: recorded routings with their graphs, and messages between stages."""
        for chunk in self._model.chunks:
            for router in routers_of(chunk):
                router.recorded = router.replay = None
        if self._pipeline is not None:
            self._pipeline["p2p_communicator"].abandon()

    def _forward_step(
        self, step: MicroBatchStep, micro_batches: Iterator[SequenceBatch], chunk: nn.Module
    ) -> tuple[Tensor, Any]:
        micro_batch = next(micro_batches)
        tokens = self._shards.slice_of(micro_batch)
        routers = routers_of(chunk)
        self._prescribe(routers, own_routing(micro_batch, tokens))
        hidden: Tensor = chunk(tokens, self._shards.context)
        routings = [router.recorded for router in routers if router.recorded is not None]
        return hidden, partial(self._loss, step, micro_batch, tokens, routings)

    def _prescribe(self, routers: Sequence[PackedRouter], routing: Tensor | None) -> None:
        """Let routers choose as recorded: ``[L, layers, k]`` for the tokens of this context parallel rank."""
        if routing is not None and routing.shape[1] != len(routers):
            raise BatchError(
                f"token field 'routing' is for {routing.shape[1]} layers; this "
                f"{self._model.hf_config.model_type!r} model has {len(routers)} with experts"
            )
        if routing is not None and self._layout.sequence_parallel:
            routing = routing.chunk(self._layout.tp)[self._shards.tensor.rank]
        for layer, router in enumerate(routers):
            router.replay = None if routing is None else routing[:, layer]

    def _check_routing(self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep) -> None:
        """Refuse, on all ranks alike, what would need the routers of other stages."""
        asked = {"aux_loss", "routing"}.intersection(step.outputs)
        if self._layout.pp > 1 and (asked or any("routing" in batch.tokens for batch in micro_batches)):
            raise UnsupportedCapability(
                f"pp={self._layout.pp}: the last stage does not see the routers of the others, so it can neither "
                "balance (model.router_aux_coef), nor record, nor replay their choices; set pp to 1"
            )

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
        outputs = self._outputs(step, PackedStates(hidden.squeeze(1), tokens, micro_batch, self._shards))
        if "aux_loss" in step.outputs or "routing" in step.outputs:
            family = self._model.hf_config.model_type
            outputs |= whole_outputs(routings, self._shards, micro_batch, step.outputs, family)
        loss = step(ModelOutput(**outputs), micro_batch)
        return loss, torch.tensor(1, dtype=torch.int), {}

    def _outputs(self, step: MicroBatchStep, states: PackedStates) -> dict[str, Tensor]:
        last, size = self._model.chunks[-1], self._model.hf_config.vocab_size
        if self._head != "lm":
            return scalar_outputs(states, last.output_layer, self._head)
        vocabulary = self._shards.vocabulary(size)
        weight = last.head_weight(0 if vocabulary is None else vocabulary.start)
        head = LanguageModelHead(vocab_size=size)
        return head.outputs(states, weight, None, step.outputs, step.temperature, step.trained_only)
