"""The work that all training benchmarks share: a small Qwen3, and rollouts of skewed lengths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from core_rl.backend.metrics import Metric
from core_rl.data.batch import SequenceBatch
from core_rl.data.outputs import ModelOutput

MODEL: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 8192,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}


def model_of(width: int | None) -> dict[str, Any]:
    """`MODEL`, or the two layers of this ``width`` that the quickstart trains."""
    if width is None:
        return MODEL
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "head_dim": width // 4, "vocab_size": 15}
    return {**MODEL, **sizes, "num_hidden_layers": 2, "num_attention_heads": 4}


def skewed_lengths(count: int) -> list[int]:
    """Log-normal lengths (sigma 0.8) clipped to 16..512, with a mean near 120 tokens."""
    random = torch.Generator().manual_seed(0)
    sigma = 0.8
    location = torch.log(torch.tensor(120.0)) - sigma**2 / 2
    lengths = torch.exp(location + sigma * torch.randn(count, generator=random))
    return [int(n) for n in lengths.clamp(16, 512)]


def make_batch(lengths: list[int], vocab_size: int = MODEL["vocab_size"]) -> SequenceBatch:
    """Random token ids; every token but the first of each sequence is trained."""
    random = torch.Generator().manual_seed(0)
    return SequenceBatch.from_sequences(
        [torch.randint(0, vocab_size, (length,), generator=random) for length in lengths]
    )


def train_last(batch: SequenceBatch, part: float) -> SequenceBatch:
    """The same sequences, of each of which the last ``part`` of the tokens is trained, at least one."""
    masks = []
    for length in batch.lengths:
        trained = max(1, round(part * (length - 1)))
        masks.append(torch.arange(length) >= length - trained)
    return SequenceBatch.from_sequences(batch.input_ids.split(batch.lengths), tokens={"loss_mask": masks})


def token_nll(output: ModelOutput, batch: SequenceBatch) -> tuple[Tensor, Mapping[str, Metric]]:
    """Sum of negative log-probs over the trained tokens."""
    return -torch.where(batch.loss_mask, output["logprobs"], 0.0).sum(), {}
