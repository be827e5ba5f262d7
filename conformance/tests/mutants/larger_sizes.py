"""Faults that begin at larger sizes than in `sizes`, or in training alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from core_rl.backend.steps import MicroBatchStep
from core_rl.data.batch import SequenceBatch
from core_rl.data.outputs import ModelOutput
from core_rl.distributed.collectives import add_up, buckets
from mutants.bases import Packed, Replicated, TrainContext
from mutants.outputs import WithTemperature
from mutants.zoo import DP2, Mutant


@Mutant("I7.large-vocabulary", "a file of token ids as uint16", "only tokens after an id above 65,535")
class UnsignedIds(Packed):
    """Ids pass through uint16 on their way to the embedding."""

    def adopt(self, model: PreTrainedModel, context: TrainContext, optimizer: Any = None) -> None:
        super().adopt(model, context, optimizer)
        model.base_model.register_forward_pre_hook(_unsigned, with_kwargs=True)


def _unsigned(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, kwargs | {"input_ids": kwargs["input_ids"] & 0xFFFF}


@Mutant(
    "I7.long-sequences",
    "numbers of segments as uint8",
    "only sequences from number 256 of a pass on are wrong",
)
class SequencesInOneByte(Packed):
    """Log-probs behind the 256th sequence of a pass are 0."""

    def outputs(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        output = super().outputs(micro_batch, step)
        if output.logprobs is None:
            return output
        end = int(micro_batch.cu_seqlens[min(256, micro_batch.num_sequences)])
        known = torch.arange(micro_batch.num_tokens) < end
        return replace(output, logprobs=torch.where(known, output.logprobs, 0.0))


@Mutant("I7.large-vocabulary", "labels as int16", "the loss with a large vocabulary is")
class TrainsSmallIds(Packed):
    """In training, ids pass through int16."""

    def outputs(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        if step.trained_only:
            ids = micro_batch.input_ids.to(torch.int16).long() % self.model.config.vocab_size
            micro_batch = replace(micro_batch, input_ids=ids)
        return super().outputs(micro_batch, step)


@Mutant(
    "I7.large-vocabulary", "a kernel over 2^15 columns", r"gradients with a large vocabulary[\s\S]*lm_head"
)
class TrainsSmallHead(Packed):
    """Rows of the head from 32,768 on have no gradient."""

    def reduce_grads(self) -> None:
        super().reduce_grads()
        head = self.model.get_output_embeddings()
        if isinstance(head, nn.Linear) and head.weight.grad is not None:
            head.weight.grad[2**15 :] = 0.0


@Mutant("I8.low-temperature", "a clamp in a fused loss", r"the loss in training at temperature 0\.05 is")
class TrainsWarm(Packed):
    """In training, temperatures below 0.5 are taken for 0.5."""

    def outputs(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        if step.trained_only:
            step = WithTemperature(step, max(step.temperature, 0.5))
        return super().outputs(micro_batch, step)


@Mutant("I1.many-sequences", "a buffer of a fused loss", "gradients of 190 sequences in one pass")
class TrainsShortPasses(Packed):
    """In training, log-probs behind the 4,096th token of a pass have no graph."""

    def outputs(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        output = super().outputs(micro_batch, step)
        if output.logprobs is None:
            return output
        known = torch.arange(micro_batch.num_tokens) < 4096
        return replace(output, logprobs=torch.where(known, output.logprobs, output.logprobs.detach()))


@Mutant(
    "I1.large-tensors", "a loop over full buckets", "gradients of large tensors", layout=DP2, family="gpt2"
)
class LastBucketStays(Replicated):
    """Of several buckets of gradients, the last one is not added up."""

    def reduce_grads(self) -> None:
        grads = [grad for _, grad in self.gradients()]
        full = list(buckets(grads, [grad.nbytes for grad in grads], self.reduce_bytes))
        for bucket in full[:-1] or full:
            add_up(bucket, self.context.groups.data_parallel)


@Mutant(
    "I1.large-tensors",
    "a matrix larger than a bucket",
    r"gradients of large tensors[\s\S]*embed_tokens",
    layout=DP2,
    family="qwen3",
)
class LargestGradientsStay(Replicated):
    """Gradients larger than a bucket are not added up."""

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        for name, grad in super().gradients():
            if grad.nbytes <= self.reduce_bytes:
                yield name, grad
