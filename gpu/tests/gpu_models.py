"""Shapes of published models and a tiny one for rehearsals; engines and batches of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from gpu_points import Setting
from torch import Tensor

from core_rl.backend.loss import LossSpec
from core_rl.backend.metrics import Metric
from core_rl.config.base import parse_config
from core_rl.data.batch import SequenceBatch
from core_rl.data.outputs import ModelOutput, masked_sum
from core_rl.engine.inference import InferenceEngine
from core_rl.engine.loading import load_engine
from core_rl.engine.train import TrainEngine
from core_rl.registry.engines import get_spec, load_config

EngineT = TypeVar("EngineT", TrainEngine, InferenceEngine)
PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
"""Dense bfloat16 FLOP/s by the makers' data sheets (SXM)."""

_QWEN3 = {
    "model_type": "qwen3",
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "max_position_embeddings": 8192,
}
QWEN3_0_6B: dict[str, Any] = {
    **_QWEN3,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "tie_word_embeddings": True,
}
QWEN3_1_7B: dict[str, Any] = {**QWEN3_0_6B, "hidden_size": 2048, "intermediate_size": 6144}
QWEN3_8B: dict[str, Any] = {
    **_QWEN3,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "tie_word_embeddings": False,
}
TINY: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "vocab_size": 211,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}


def model_flops(shape: dict[str, Any], lengths: list[int]) -> float:
    """FLOPs of forward and backward, three times the forward pass: 2 for each weight of a matrix and token, and for
    causal attention 2 x heads x head size x length of the sequence for each token and layer.
    """
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    queries = shape["num_attention_heads"] * shape["head_dim"]
    keys = shape["num_key_value_heads"] * shape["head_dim"]
    layer = hidden * (2 * queries + 2 * keys) + 3 * hidden * inner
    weights = shape["num_hidden_layers"] * layer + hidden * shape["vocab_size"]
    attention = 2 * queries * shape["num_hidden_layers"]
    forward: int = sum(2 * weights * length + attention * length * length for length in lengths)
    return 3.0 * forward


def started(kind: type[EngineT], name: str, values: Mapping[str, Any]) -> EngineT:
    """The engine ``name`` with the config ``values``, initialised in this process."""
    spec = get_spec(name)
    engine = load_engine(spec, parse_config(load_config(spec), values))
    assert isinstance(engine, kind)
    engine.initialize()
    return engine


def negative_logprobs(output: ModelOutput, batch: SequenceBatch) -> tuple[Tensor, Mapping[str, Metric]]:
    """Their sum over the trained tokens."""
    return -masked_sum(output["logprobs"], batch.loss_mask), {}


LOSS = LossSpec(fn=negative_logprobs)


def engine_of(setting: Setting, shape: dict[str, Any], name: str = "fsdp", **fields: Any) -> TrainEngine:
    """An engine of one rank in this process, in bfloat16."""
    values = {"model": {"config": shape}, "dtype": "bfloat16", "device": setting.device, **fields}
    return started(TrainEngine, name, values)


def batch_of(setting: Setting, vocabulary: int, tokens: int) -> SequenceBatch:
    """Sequences of many lengths with ``tokens`` in all."""
    generator, lengths, left = torch.Generator().manual_seed(0), list[int](), tokens
    while left > 0:
        length = min(left, int(torch.randint(2, setting.size(4096, 64), (), generator=generator)))
        lengths.append(length)
        left -= length
    return SequenceBatch.from_sequences(
        [torch.randint(0, vocabulary, (length,), generator=generator) for length in lengths]
    )


def group_of(vocabulary: int, prompt: int, completion: int, size: int = 8) -> SequenceBatch:
    """``size`` random completions of a prompt; completions are trained."""
    random = torch.Generator().manual_seed(0)
    shared = torch.randint(0, vocabulary, (prompt,), generator=random)
    completions = torch.randint(0, vocabulary, (size, completion), generator=random)
    rows = [torch.cat([shared, row]) for row in completions]
    return SequenceBatch.from_sequences(
        rows, tokens={"loss_mask": [torch.arange(len(row)) >= prompt for row in rows]}
    )
