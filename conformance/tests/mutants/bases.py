"""Correct engines of other makes than the reference: what mutants break."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from core_rl.backend.meta import FinetuneSpec
from core_rl.backend.steps import MicroBatchStep
from core_rl.data.batch import SequenceBatch
from core_rl.data.outputs import ModelOutput
from core_rl.distributed.process_group import RankAddress
from core_rl.reference.train import ReferenceEngine
from core_rl.toolkit.attention import PACKED_ATTENTION, register_packed_attention
from core_rl.toolkit.build import build_model
from core_rl.toolkit.packed import PackedModel


class Replicated(ReferenceEngine):
    """Every rank holds the whole model; gradients are added up over ranks."""

    def _reduce_grads(self) -> None:
        if self.world.size == 1:
            return
        for name, parameter in self._named_parameters():
            if parameter.requires_grad:
                grad = self._quantity(name, parameter, "grads")
                dist.all_reduce(grad, group=self.world.group)
                parameter.grad = grad


class Packed(Replicated):
    """The same on packed sequences."""

    def _build(self, addr: RankAddress, ft_spec: FinetuneSpec) -> None:
        register_packed_attention()
        model = build_model(self.config.model, seed=self.config.seed, attn_implementation=PACKED_ATTENTION)
        self._packed = PackedModel(model, self.config.model.head)
        self._adopt(model)

    def _run(self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep, forward_only: bool) -> None:
        for micro_batch in micro_batches:
            loss = step(self._outputs(micro_batch, step), micro_batch)
            if not forward_only:
                loss.backward()

    def _outputs(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        return ModelOutput(**self._packed(micro_batch, step.outputs, step.temperature, step.trained_only))
