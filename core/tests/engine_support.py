"""A tiny model, a batch and losses for tests that need a real engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from core_rl.backend.metrics import Metric
from core_rl.config.engine import ModelConfig, OptimizerConfig, TrainEngineConfig
from core_rl.data.batch import SequenceBatch
from core_rl.data.outputs import ModelOutput
from core_rl.engine.loading import load_engine
from core_rl.engine.train import TrainEngine
from core_rl.reference import SPEC, ReferenceConfig

VOCABULARY = 61
TINY: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
OPTIMIZER = OptimizerConfig(lr=1e-2)


def config(optimizer: OptimizerConfig | None = OPTIMIZER, **model: Any) -> TrainEngineConfig:
    """The reference engine's config for the tiny model."""
    return ReferenceConfig(model=ModelConfig(config=TINY, **model), optimizer=optimizer)


def engine(settings: TrainEngineConfig | None = None) -> TrainEngine:
    """An initialised reference engine; the caller destroys it."""
    built = load_engine(SPEC, settings or config())
    built.initialize()
    return built


@contextmanager
def one_at_a_time() -> Iterator[Callable[[TrainEngineConfig], TrainEngine]]:
    """Builds engines, each in place of its predecessor, and destroys the last."""
    running: list[TrainEngine] = []

    def replaced(settings: TrainEngineConfig) -> TrainEngine:
        if running:
            running.pop().destroy()
        running.append(engine(settings))
        return running[-1]

    yield replaced
    for last in running:
        last.destroy()


def batch(seed: int = 0, lengths: tuple[int, ...] = (5, 9, 3)) -> SequenceBatch:
    """Random sequences with a loss mask and a weight for each token."""
    random = torch.Generator().manual_seed(seed)
    return SequenceBatch.from_sequences(
        [torch.randint(0, VOCABULARY, (n,), generator=random) for n in lengths],
        tokens={
            "loss_mask": [torch.rand(n, generator=random) > 0.2 for n in lengths],
            "weight": [torch.rand(n, generator=random) for n in lengths],
        },
    )


def weighted_nll(output: ModelOutput, data: SequenceBatch) -> tuple[Tensor, Mapping[str, Metric]]:
    """Sum of ``-weight * log p`` over the trained tokens."""
    total = -torch.where(data.loss_mask, data["weight"] * output["logprobs"], 0.0).sum()
    return total, {"nll": Metric.mean(total, data.loss_mask.sum())}


def nan_loss(output: ModelOutput, data: SequenceBatch) -> tuple[Tensor, Mapping[str, Metric]]:
    """NaN, with a graph."""
    return output["logprobs"].sum() * float("nan"), {}


def mean_loss(output: ModelOutput, data: SequenceBatch) -> tuple[Tensor, Mapping[str, Metric]]:
    """Breaks the contract: one value for each token."""
    return output["logprobs"], {}
