"""A tiny Qwen3, ragged batches and a loss for the tests of train engines that have groups of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from tiny_families import token_logprobs
from torch import Tensor

from core_rl.backend.metrics import Metric
from core_rl.config.base import parse_config
from core_rl.config.engine import TrainEngineConfig
from core_rl.data.batch import SequenceBatch
from core_rl.data.outputs import ModelOutput
from core_rl.launch.group import EngineGroup
from core_rl.registry.engines import get_spec, load_config

VOCABULARY = 61
TINY: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "tie_word_embeddings": False,
}
"""Fields of a mixture of experts over `TINY`."""


def config_of(
    engine: str,
    model: Mapping[str, Any],
    optimizer: Mapping[str, Any],
    layout: Mapping[str, Any] | None,
    options: Mapping[str, Any] | None,
    **section: Any,
) -> TrainEngineConfig:
    """A config of ``engine`` for a ``model`` by its fields; ``section`` adds to the model's section."""
    values: dict[str, Any] = {
        "model": {"config": dict(model), **section},
        "optimizer": dict(optimizer),
        "layout": dict(layout or {}),
        "device": "cpu",
    }
    if options:
        values["options"] = dict(options)
    actual = parse_config(load_config(get_spec(engine)), values, "a test's config")
    assert isinstance(actual, TrainEngineConfig)
    return actual


def started(actual: TrainEngineConfig, engine: str) -> EngineGroup:
    """A group of ``engine``, initialized."""
    group = EngineGroup(get_spec(engine), actual)
    group.initialize()
    return group


def batch(seed: int = 0) -> SequenceBatch:
    """Seven ragged sequences with advantages."""
    generator = torch.Generator().manual_seed(seed)
    lengths = (3, 11, 1, 7, 20, 5, 9)
    rows = [torch.randint(0, VOCABULARY, (n,), generator=generator) for n in lengths]
    packed = SequenceBatch.from_sequences(rows)
    return packed.with_tokens(advantages=torch.randn(packed.num_tokens, generator=generator))


def weighted_nll(output: ModelOutput, micro_batch: SequenceBatch) -> tuple[Tensor, Mapping[str, Metric]]:
    """A sum of log-probs weighted by advantages, and the mean log-prob."""
    logprobs = output["logprobs"]
    return -(logprobs * micro_batch["advantages"]).sum(), {
        "mean": Metric.mean(logprobs.sum(), micro_batch.loss_mask.sum())
    }


def plain_logprobs(model: Any, batch: SequenceBatch) -> Tensor:
    """Log-probs ``[T]`` of the plain ``model``, one sequence at a time."""
    rows = token_logprobs(model, batch.input_ids.split(batch.lengths))
    return torch.cat([F.pad(row, (1, 0)) for row in rows])
