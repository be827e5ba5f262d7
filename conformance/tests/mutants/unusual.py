"""Correct engines of unusual make, which no check may take for wrong ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from core_rl.backend.steps import MicroBatchStep
from core_rl.backend.train_backend import PassMode
from core_rl.data.batch import SequenceBatch
from core_rl.data.outputs import ModelOutput
from core_rl.distributed.collectives import add_up
from core_rl.toolkit.optimizer import build_adamw
from mutants.bases import Packed, Replicated, TrainContext


class OptimizerInHooks(Packed):
    """Every parameter has an optimizer of its own, which a hook of that parameter calls."""

    def adopt(self, model: PreTrainedModel, context: TrainContext, optimizer: Any = None) -> None:
        config = context.config.optimizer
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if config is not None and trained:
            optimizer = _HookedAdamW(build_adamw(trained, config))
        super().adopt(model, context, optimizer)


class _HookedAdamW(torch.optim.Optimizer):
    """AdamW by one hook for each parameter. Its groups and its state belong to ``like``."""

    def __init__(self, like: torch.optim.AdamW) -> None:
        groups = [dict(group) for group in like.param_groups]
        super().__init__(groups, like.defaults)
        self.state.update(like.state)
        self._hooks = [
            self._hook_of(group, parameter) for group in self.param_groups for parameter in group["params"]
        ]

    def _hook_of(self, group: dict[str, Any], parameter: nn.Parameter) -> Callable[[], None]:
        optimizer = torch.optim.AdamW(
            [parameter],
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            foreach=False,
        )
        optimizer.state = self.state

        def hook() -> None:
            optimizer.param_groups[0]["lr"] = group["lr"]
            optimizer.step()

        return hook

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for hook in self._hooks:
            hook()


class SortsByLength(Packed):
    """Sequences are computed in the order of their lengths, and outputs put back."""

    def outputs(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        order = sorted(range(micro_batch.num_sequences), key=lambda row: -micro_batch.lengths[row])
        outputs = super().outputs(micro_batch.select(order), step)
        tokens = torch.argsort(micro_batch.token_index(order))
        rows = torch.argsort(torch.tensor(order))
        of_sequences = ("scores", "bootstrap")
        return ModelOutput(
            **{
                name: value if not value.dim() else value[rows if name in of_sequences else tokens]
                for name, value in outputs.items()
            }
        )


class LogitsWhereTrained(Replicated):
    """In training, the head multiplies the hidden states before trained tokens alone."""

    def routed(self, row: SequenceBatch, step: MicroBatchStep) -> dict[str, Tensor]:
        config = self.context.config.model
        if config.head != "lm" or not step.trained_only or self.model.config.model_type == "gemma2":
            return super().routed(row, step)
        with self.routers.watch(row.tokens.get("routing")) as routings:
            hidden = self.model.base_model(input_ids=row.input_ids[None], use_cache=False).last_hidden_state[
                0
            ]
            outputs = self._at(row, hidden, step)
        return {**outputs, **self.routers.outputs(routings, row.cu_seqlens, step.outputs)}

    def _at(self, row: SequenceBatch, hidden: Tensor, step: MicroBatchStep) -> dict[str, Tensor]:
        head: Any = self.model.get_output_embeddings()
        trained = (row.loss_mask & row.not_first).nonzero()[:, 0]
        logits = head(hidden[trained - 1]).float() / step.temperature
        log_p = F.log_softmax(logits, dim=-1)
        values = {
            "logprobs": log_p.gather(1, row.input_ids[trained][:, None])[:, 0],
            "entropy": -(log_p.exp() * log_p).sum(-1),
            "logits": logits,
        }
        return {
            name: value.new_zeros((row.num_tokens, *value.shape[1:])).index_copy(0, trained, value)
            for name, value in values.items()
            if name in step.outputs
        }


class GradientsInFloat64(Packed):
    """Gradients of micro-batches and of ranks are added up in float64."""

    def adopt(self, model: PreTrainedModel, context: TrainContext, optimizer: Any = None) -> None:
        self.sums: dict[nn.Parameter, Tensor] = {}
        super().adopt(model, context, optimizer)

    def run(self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep, mode: PassMode) -> None:
        for micro_batch in micro_batches:
            super().run([micro_batch], step, mode)
            if mode != "forward":
                self._take()

    def _take(self) -> None:
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                before = self.sums.get(parameter, 0.0)
                self.sums[parameter] = parameter.grad.double() + before
                parameter.grad = None

    def reduce_grads(self) -> None:
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        totals = [
            self.sums.get(parameter, torch.zeros_like(parameter, dtype=torch.float64))
            for parameter in trained
        ]
        if self.context.groups.data_parallel.size > 1:
            add_up(totals, self.context.groups.data_parallel)
        for parameter, total in zip(trained, totals, strict=True):
            parameter.grad = total.float()
        self.sums.clear()

    def zero_grad(self) -> None:
        super().zero_grad()
        if hasattr(self, "sums"):
            self.sums.clear()


UNUSUAL = (OptimizerInHooks, SortsByLength, LogitsWhereTrained, GradientsInFloat64)
