"""All weights on every rank, gradients added up once for each step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from core_rl.backend.meta import FinetuneSpec
from core_rl.backend.steps import MicroBatchStep
from core_rl.data.batch import SequenceBatch
from core_rl.data.outputs import ModelOutput
from core_rl.distributed.process_group import RankAddress
from core_rl.toolkit.attention import PACKED_ATTENTION, register_packed_attention
from core_rl.toolkit.build import build_model
from core_rl.toolkit.hf_engine import HFTrainEngine
from core_rl.toolkit.packed import PackedModel
from core_rl_ddp.config import DDPConfig

__all__ = ["DDPEngine"]


class DDPEngine(HFTrainEngine):
    """Every rank holds the whole model, and runs it on its own sequences."""

    config: DDPConfig

    def _build(self, addr: RankAddress, ft_spec: FinetuneSpec) -> None:
        register_packed_attention()
        # The seed is the same on all ranks, so they begin with the same weights.
        model = build_model(self.config.model, seed=self.config.seed, attn_implementation=PACKED_ATTENTION)
        self._packed = PackedModel(model, self.config.model.head).to(self.device)
        self._adopt(model)

    def _run(self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep, forward_only: bool) -> None:
        for micro_batch in micro_batches:
            outputs = self._packed(micro_batch, step.outputs, step.temperature, step.trained_only)
            loss = step(ModelOutput(**outputs), micro_batch)
            if not forward_only:
                loss.backward()

    def _reduce_grads(self) -> None:
        """Sum, not mean: the core has divided the loss by the weight of all ranks."""
        for bucket in self._buckets():
            flat = torch.cat([grad.reshape(-1) for grad in bucket])
            dist.all_reduce(flat)
            for grad, total in zip(bucket, flat.split([grad.numel() for grad in bucket]), strict=True):
                grad.copy_(total.view_as(grad))

    def _buckets(self) -> Iterator[list[Tensor]]:
        """All gradients in the same order on every rank, also where a rank has none of its own."""
        bucket: list[Tensor] = []
        for parameter in self.model.parameters():
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            bucket.append(parameter.grad)
            if sum(grad.nbytes for grad in bucket) >= self.config.options.bucket_bytes:
                yield bucket
                bucket = []
        if bucket:
            yield bucket
