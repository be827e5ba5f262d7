"""Support of the tests of algorithms: ragged batches, and a small engine that keeps the loss contract."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from core_rl.backend.loss import LossSpec
from core_rl.backend.meta import SaveLoadMeta
from core_rl.backend.metrics import merge_metrics
from core_rl.data.batch import SequenceBatch
from core_rl.data.micro_batch import MicroBatchSpec, count_micro_batches, plan_micro_batches
from core_rl.data.outputs import ModelOutput, OutputName

VOCABULARY = 11


def ragged_batch(lengths: Sequence[int], seed: int = 0, prompt: int = 1) -> SequenceBatch:
    """Sequences with a trained tail, noisy float64 token fields, and groups of two."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)

    def noise(scale: float) -> Tensor:
        return torch.randn(total, generator=generator, dtype=torch.float64) * scale

    logprobs = -noise(1.0).abs()
    mask = torch.cat([torch.arange(length) >= min(prompt, length - 1) for length in lengths])
    return SequenceBatch(
        input_ids=torch.randint(0, VOCABULARY, (total,), generator=generator),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0),
        tokens={
            "loss_mask": mask,
            "logprobs": logprobs,
            "prox_logprobs": logprobs + noise(0.2),
            "ref_logprobs": logprobs + noise(0.5),
            "advantages": noise(1.0),
        },
        sequences={
            "rewards": torch.randn(len(lengths), generator=generator),
            "group": torch.arange(len(lengths)) // 2,
        },
    )


def drop_tokens(batch: SequenceBatch, *names: str) -> SequenceBatch:
    """``batch`` without these token fields."""
    return SequenceBatch(
        input_ids=batch.input_ids,
        cu_seqlens=batch.cu_seqlens,
        tokens={name: value for name, value in batch.tokens.items() if name not in names},
        sequences=batch.sequences,
    )


def trained_rows(batch: SequenceBatch) -> list[list[int]]:
    """The positions of the trained tokens of each sequence."""
    bounds, mask = batch.cu_seqlens.tolist(), batch.loss_mask.tolist()
    return [
        [t for t in range(start, end) if mask[t]] for start, end in zip(bounds[:-1], bounds[1:], strict=True)
    ]


@dataclass
class BigramEngine:
    """A `TrainEngineLike` in float64: the log-probs of a token depend on the previous token. Plain SGD."""

    lr: float = 0.5
    weights: Tensor = field(default_factory=lambda: torch.zeros(VOCABULARY, VOCABULARY, dtype=torch.float64))
    batches: list[SequenceBatch] = field(default_factory=list)
    """Arguments of `train_batch`."""

    def __post_init__(self) -> None:
        self.weights.requires_grad_(True)

    def run(self, batch: SequenceBatch, temperature: float) -> ModelOutput:
        log_p = (self.weights[batch.input_ids.roll(1)] / temperature).log_softmax(-1)
        first = torch.zeros(batch.num_tokens, dtype=torch.bool)
        first[batch.cu_seqlens[:-1].long()] = True
        logprobs = log_p.gather(1, batch.input_ids[:, None]).squeeze(1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        return ModelOutput(logprobs=logprobs.masked_fill(first, 0), entropy=entropy.masked_fill(first, 0))

    def gradient(self, batch: SequenceBatch, loss: LossSpec, mb_spec: MicroBatchSpec) -> dict[str, float]:
        """Leave the gradient of (sum of totals) / (sum of weights) in ``weights.grad``; the metrics."""
        self.weights.grad = None
        plan = plan_micro_batches(batch, mb_spec, count_micro_batches(batch, mb_spec))
        parts = [batch.select(part) for part in plan if part]
        weight, metrics = sum(map(loss.weight, parts)), []
        for part in parts:
            total, values = loss.total(self.run(part, loss.temperature).masked(part.loss_mask), part)
            (total / weight).backward()
            metrics.append(values)
        return {name: metric.result() for name, metric in merge_metrics(metrics).items()}

    def train_batch(self, batch: SequenceBatch, loss: LossSpec, mb_spec: MicroBatchSpec) -> dict[str, float]:
        self.batches.append(batch)
        metrics = self.gradient(batch, loss, mb_spec)
        assert self.weights.grad is not None
        with torch.no_grad():
            self.weights -= self.lr * self.weights.grad
        return metrics

    def forward(
        self,
        batch: SequenceBatch,
        mb_spec: MicroBatchSpec,
        outputs: tuple[OutputName, ...] = ("logprobs",),
        temperature: float = 1.0,
    ) -> ModelOutput:
        return self.run(batch, temperature).detached()

    def save(self, meta: SaveLoadMeta) -> None:
        raise NotImplementedError
