"""Engines that keep something of an earlier pass, batch or run, and use it where only some sessions look."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from core_rl.backend.steps import MicroBatchStep
from core_rl.backend.tensors import TensorSource
from core_rl.backend.train_backend import PassMode
from core_rl.data.batch import SequenceBatch
from core_rl.data.outputs import ModelOutput
from mutants.bases import OwnCheckpoint, OwnExport, Packed, TrainContext
from mutants.zoo import DP2, Mutant


@Mutant("I13.hidden-caches", "CUDA graphs with static outputs", "log-probs of micro-batches of one size")
class OneBufferForEachSize(Packed):
    """Log-probs of forward passes lie in a buffer for each number of tokens, which the next one overwrites."""

    def build(self, context: TrainContext) -> None:
        self._buffers: dict[int, Tensor] = {}
        super().build(context)

    def outputs(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        outputs = super().outputs(micro_batch, step)
        if torch.is_grad_enabled() or outputs.logprobs is None:
            return outputs
        buffer = self._buffers.setdefault(micro_batch.num_tokens, torch.empty_like(outputs.logprobs))
        return replace(outputs, logprobs=buffer.copy_(outputs.logprobs))


@Mutant(
    "contract.flat-memory",
    "a cache by batch without a bound",
    r"50 calls of train_batch\(\) left (4\d|5\d) more tensors",
)
class KeepsAMaskForEachBatch(Packed):
    """Something is kept for each different batch, without a bound."""

    def build(self, context: TrainContext) -> None:
        self._masks: dict[bytes, Tensor] = {}
        super().build(context)

    def outputs(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        key = micro_batch.input_ids.numpy().tobytes()
        self._masks.setdefault(key, torch.ones(micro_batch.num_tokens))
        return super().outputs(micro_batch, step)


@Mutant("I1.training", "activations of a first epoch in a second one", "of step 2")
class EmbedsOnce(Packed):
    """In training, embeddings of a batch that was trained before stem from its old weights."""

    def adopt(self, model: PreTrainedModel, context: TrainContext, optimizer: Any = None) -> None:
        super().adopt(model, context, optimizer)
        self._embedded: dict[str, Tensor] = {}
        model.get_input_embeddings().register_forward_hook(self._remember)

    def _remember(self, module: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return output
        first = self._embedded.setdefault(repr(args[0].tolist()), output.detach().clone())
        return output + (first - output).detach()

    def after_load(self, kinds: frozenset[str]) -> None:
        super().after_load(kinds)
        self._embedded.clear()


@Mutant("I10.import", "load_state_dict(assign=True)", "gradients after a load", family="qwen3")
class UntiesAtALoad(OwnExport):
    """A load of a model directory gives the tied head a tensor of its own, which is not trained."""

    def import_tensors(self, kind: str, source: TensorSource) -> None:
        super().import_tensors(kind, source)
        head = self.model.get_output_embeddings()
        if kind == "params" and isinstance(head, nn.Linear):
            head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)


@Mutant("I11.other-layout", "Optimizer.load_state_dict", "two steps after it was loaded on dp1", layout=DP2)
class OptionsComeBack(OwnCheckpoint):
    """A checkpoint brings the betas and the decay of its own run, as the state of a torch optimizer does."""

    names = ("betas", "eps", "weight_decay")

    def save_sharded(self, directory: Path, with_optimizer: bool) -> None:
        super().save_sharded(directory, with_optimizer)
        if self.context.world.rank == 0 and self.optimizer is not None:
            options = [{name: group[name] for name in self.names} for group in self.optimizer.param_groups]
            (directory / "own" / "groups.json").write_text(json.dumps(options))

    def load_sharded(self, directory: Path, with_optimizer: bool) -> None:
        super().load_sharded(directory, with_optimizer)
        if with_optimizer and self.optimizer is not None:
            saved = json.loads((directory / "own" / "groups.json").read_text())
            for group, values in zip(self.optimizer.param_groups, saved, strict=True):
                group.update(values)


@Mutant(
    "contract.global-state",
    "a kernel that is chosen for good",
    r"train_batch\(\) left torch.backends.cuda.flash_sdp_enabled\(\) = False",
)
class ChoosesAKernel(Packed):
    """A training pass turns a kernel of attention off for the whole process."""

    def run(self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep, mode: PassMode) -> None:
        super().run(micro_batches, step, mode)
        if mode != "forward":
            torch.backends.cuda.enable_flash_sdp(False)


@Mutant(
    "contract.global-state",
    "a setting that is restored without a finally",
    r"forward_backward\(\) that raised left torch.get_default_dtype\(\) = torch.float64",
)
class LeavesADtypeAfterAFailure(Packed):
    """The default dtype is restored after a pass, unless it raises."""

    def run(self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep, mode: PassMode) -> None:
        try:
            super().run(micro_batches, step, mode)
        except BaseException:
            torch.set_default_dtype(torch.float64)
            raise
