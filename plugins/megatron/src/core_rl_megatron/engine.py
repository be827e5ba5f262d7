"""The Megatron-Core engine: its GPT model, schedules and optimizer, over packed batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, cast

import torch
from megatron.core import parallel_state as mpu
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from core_rl.backend.meta import FinetuneSpec, StatePart
from core_rl.backend.steps import MicroBatchStep
from core_rl.data.batch import SequenceBatch
from core_rl.data.outputs import ModelOutput
from core_rl.distributed.comm import Comm, RankGroups
from core_rl.distributed.process_group import RankAddress
from core_rl.engine.guards import check_experts
from core_rl.errors import BatchError, ConfigError, UnsupportedCapability
from core_rl.state.host_copies import HostCopies, guarded, own_memory
from core_rl.toolkit.build import build_model
from core_rl.toolkit.heads import LanguageModelHead, PackedStates, scalar_outputs
from core_rl.toolkit.meta_build import build_on_meta
from core_rl.toolkit.parallel_context import TokenSlice
from core_rl.toolkit.routers import Routing, own_routing
from core_rl_megatron import cpu_shim
from core_rl_megatron.experts import PackedRouter, mark_experts, routers_of, whole_outputs
from core_rl_megatron.modules import PackedGPT, build_chunk, padding_token
from core_rl_megatron.naming import placements
from core_rl_megatron.pipeline import schedule_groups
from core_rl_megatron.places import TrackedDraws, leave_groups, make_groups
from core_rl_megatron.state import OptimizerState, build_optimizer
from core_rl_megatron.translation import transformer_config
from core_rl_megatron.versions import check_megatron
from core_rl_megatron.weights import MegatronTensors, Written, freeze, written_weights

__all__ = ["MegatronEngine"]


class MegatronEngine(MegatronTensors):
    """One rank of a model in Megatron's layouts."""

    def _groups(self, world: Comm) -> RankGroups:
        check_megatron()
        cpu_shim.install(self.device)
        options = self.config.options
        self._places = make_groups(world, self.layout, options.virtual_stages, self.timeout_s)
        return self._places.groups

    def _build(self, addr: RankAddress, ft_spec: FinetuneSpec) -> None:
        try:
            self._build_all()
        except BaseException:
            leave_groups()  # they are global: the next engine of this process makes its own
            raise

    def _build_all(self) -> None:
        chosen, seed = self.config.model, self.config.seed
        unloaded = build_on_meta(chosen, seed=seed, attn_implementation="sdpa")
        model = unloaded.model if unloaded else build_model(chosen, seed=seed, attn_implementation="sdpa")
        check_experts(self.spec, chosen, model.config)
        if chosen.router_aux_coef and (self.layout.pp > 1 or self.config.options.recompute == "full"):
            raise ConfigError(
                f"model.router_aux_coef = {chosen.router_aux_coef} needs the routers' logits, with their gradients, "
                "where the loss is; set it to 0, or layout.pp to 1 and options.recompute to 'none' or 'selective'"
            )
        self._hf, self._padding_id = model.config, padding_token(model)
        self._names = Written(model)
        source = unloaded.source if unloaded else written_weights(model, self._names)
        self._tracked = TrackedDraws(seed)
        self._megatron_config = transformer_config(self.config, model.config)
        self._pipeline = schedule_groups(self._megatron_config, self.device) if self.layout.pp > 1 else None
        self._on_host: dict[StatePart, ExitStack] = {}
        self._dropped = False
        with cpu_shim.building(), self._tracked.own():
            self._chunks = [self._chunk(*stage) for stage in self._stages()]
            self._wrapped: list[nn.Module] = list(self._chunks)
            self._optimizer_state = self._train_all() if self.config.optimizer else None
        self._adopt(self._chunks)
        if self._optimizer_state is not None:
            self._find_duplicates()
        self._load_held("master", source)

    def _stages(self) -> Iterator[tuple[bool, bool, int | None]]:
        """For each part of the model here, whether it is the first, whether it is the last, and its number."""
        count = self.config.options.virtual_stages
        for stage in range(count) if count > 1 else (None,):
            here = {"ignore_virtual": False, "vp_stage": stage}
            yield mpu.is_pipeline_first_stage(**here), mpu.is_pipeline_last_stage(**here), stage

    def _chunk(self, first: bool, last: bool, stage: int | None) -> PackedGPT:
        head = self.config.model.head
        chunk = build_chunk(
            self._megatron_config,
            self._hf,
            head,
            first=first,
            last=last,
            virtual_stage=stage,
            padding_id=self._padding_id,
        )
        chunk.to(self.device)
        rank, expert = mpu.get_tensor_model_parallel_rank(), mpu.get_expert_model_parallel_rank()
        mark_experts(chunk.named_parameters(), spread=max(self.layout.ep, self.layout.tp) > 1)
        for place in placements(chunk, rank, expert):
            freeze(place, self._names.trained)
            if self.config.dtype == "bfloat16" and place.slots[0].name != "score.weight":
                place.parameter.data = place.parameter.data.bfloat16()
        return chunk

    def _train_all(self) -> OptimizerState:
        """Wrap the parts of the model for data parallelism, and build the optimizer over them."""
        optimizer, spread = self.config.optimizer, self.config.options.distributed_optimizer
        assert optimizer is not None  # called for a trained model
        plan = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=spread)
        self._wrapped = [
            DistributedDataParallel(self._megatron_config, plan, chunk, disable_bucketing=number > 0)
            for number, chunk in enumerate(self._chunks)
        ]
        half = self.config.dtype == "bfloat16"
        built = build_optimizer(self._wrapped, optimizer, half=half, distributed=spread)
        return OptimizerState(built, optimizer)

    # ---------------------------------------------------------------- training

    def _set_training(self, training: bool) -> None:
        for chunk in self._chunks:
            chunk.train(training)

    @property
    def _micro_batch_multiple(self) -> int:
        return self.layout.pp if self.config.options.virtual_stages > 1 else 1

    def _run(self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep, forward_only: bool) -> None:
        self._check_routing(micro_batches, step)
        schedule = get_forward_backward_func()
        pipeline: dict[str, Any] = {} if self._pipeline is None else {**self._pipeline}
        with self._tracked.own():
            schedule(
                forward_step_func=partial(self._forward_step, step),
                data_iterator=[iter(micro_batches) for _ in self._wrapped],
                model=self._wrapped,
                num_microbatches=len(micro_batches),
                # Shapes travel with the activations (`variable_seq_lengths`), so these two are not looked at.
                seq_length=1,
                micro_batch_size=1,
                forward_only=forward_only,
                **pipeline,
            )
        if self._pipeline is not None:
            self._pipeline["p2p_communicator"].finish()

    def _forward_step(
        self, step: MicroBatchStep, micro_batches: Iterator[SequenceBatch], chunk: nn.Module
    ) -> tuple[Tensor, Any]:
        micro_batch = next(micro_batches)
        shards = self._places.shards
        tokens = shards.slice_of(micro_batch)
        routers = routers_of(chunk)
        self._prescribe(routers, own_routing(micro_batch, tokens))
        hidden: Tensor = chunk(tokens, shards.context)
        routings = [router.heard for router in routers if router.heard is not None]
        return hidden, partial(self._loss, step, micro_batch, tokens, routings)

    def _prescribe(self, routers: Sequence[PackedRouter], routing: Tensor | None) -> None:
        """Let routers choose as recorded: ``[L, layers, k]`` for the tokens of this context parallel rank."""
        if routing is not None and routing.shape[1] != len(routers):
            raise BatchError(
                f"token field 'routing' is for {routing.shape[1]} layers; this {self._hf.model_type!r} model has "
                f"{len(routers)} with experts"
            )
        if routing is not None and self.layout.sequence_parallel:
            routing = routing.chunk(self.layout.tp)[self._places.shards.tensor.rank]
        for layer, router in enumerate(routers):
            router.replay = None if routing is None else routing[:, layer]

    def _check_routing(self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep) -> None:
        """Refuse, on all ranks alike, what would need the routers of other stages."""
        asked = {"aux_loss", "routing"}.intersection(step.outputs)
        if self.layout.pp > 1 and (asked or any("routing" in batch.tokens for batch in micro_batches)):
            raise UnsupportedCapability(
                f"pp={self.layout.pp}: the last stage does not see the routers of the others, so it can neither "
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
        """What Megatron's schedule calls on the last stage, with the output of that stage.

        The gradient is that of the loss that `step` returns, times exactly 1. Three places could scale it:
        schedules.py divides by the number of tokens and of micro-batches unless
        ``calculate_per_token_loss``, which is on; DistributedDataParallel then leaves its factor
        1 / (data and context parallel ranks) out and adds up (``gradient_scaling_factor = 1.0``); and
        `finalize_model_grads` divides by a number of tokens if it gets one, and gets none.
        """
        shards = self._places.shards
        outputs = self._outputs(step, PackedStates(hidden.squeeze(1), tokens, micro_batch, shards))
        if "aux_loss" in step.outputs or "routing" in step.outputs:
            outputs |= whole_outputs(routings, shards, micro_batch, step.outputs, self._hf.model_type)
        loss = step(ModelOutput(**outputs), micro_batch)
        return loss, torch.tensor(1, dtype=torch.int), {}

    def _outputs(self, step: MicroBatchStep, states: PackedStates) -> dict[str, Tensor]:
        last, shards = self._chunks[-1], states.shards
        if self.config.model.head != "lm":
            return scalar_outputs(states, last.output_layer, self.config.model.head)
        vocabulary = shards.vocabulary(self._hf.vocab_size)
        weight = last.head_weight(0 if vocabulary is None else vocabulary.start)
        head = LanguageModelHead(vocab_size=self._hf.vocab_size)
        return head.outputs(states, weight, None, step.outputs, step.temperature, step.trained_only)

    def _zero_grad(self) -> None:
        if "model" in self._on_host:
            self._dropped = True  # their memory is not there: `_onload` zeroes them
            return
        for wrapped in self._wrapped:
            if isinstance(wrapped, DistributedDataParallel):
                wrapped.zero_grad_buffer()
        if self._optimizer_state is not None:
            self._optimizer_state.optimizer.zero_grad()

    def _reduce_grads(self) -> None:
        """Data and context parallel ranks, the two copies of a tied embedding, and norms under sequence parallelism."""
        finalize_model_grads(self._wrapped, None)

    def _set_lr(self, lr: float) -> None:
        if self._optimizer_state is not None:
            self._optimizer_state.set_lr(lr)

    def _step(self, scale: float) -> None:
        if self._optimizer_state is not None:
            self._optimizer_state.step(scale)

    def _set_update_count(self, count: int) -> None:
        if self._optimizer_state is not None:
            self._optimizer_state.set_update_count(count)

    # ------------------------------------------------------------ host memory

    def _offload(self, part: StatePart) -> None:
        copies, coming_back = HostCopies(), ExitStack()
        coming_back.callback(copies.give_back)
        if part == "model":
            own_memory(self._lone_parameters())
            copies.take(self._model_memory())
            for chunk in self._chunks:
                coming_back.enter_context(guarded(chunk))
        elif self._optimizer_state is not None:
            copies.take(self._optimizer_state.moments())
        self._on_host[part] = coming_back

    def _onload(self, part: StatePart) -> None:
        self._on_host.pop(part).close()
        if part == "model" and self._dropped:
            self._dropped = False
            self._zero_grad()

    def _lone_parameters(self) -> Iterator[nn.Parameter]:
        """Those that lie in no buffer of the distributed optimizer."""
        state = self._optimizer_state
        for chunk in self._chunks:
            yield from (p for p in chunk.parameters() if state is None or not state.is_spread(p))

    def _model_memory(self) -> Iterator[Tensor]:
        for chunk in self._chunks:
            yield from (parameter.detach() for parameter in chunk.parameters())
        yield from self._frozen.values()
        if self._optimizer_state is not None:
            yield from self._optimizer_state.mains()
        for wrapped in self._wrapped:
            if isinstance(wrapped, DistributedDataParallel):
                module = cast("Any", wrapped)
                yield from (buffer.grad_data for buffer in (*module.buffers, *module.expert_parallel_buffers))

    def _teardown(self) -> None:
        self._chunks, self._wrapped, self._optimizer_state = [], [], None
        leave_groups()
