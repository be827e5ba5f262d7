"""A tiny model, ragged batches and a loss for the tests of the FSDP engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from train_support import TINY, VOCABULARY, plain_logprobs

from core_rl.backend.loss import LossSpec
from core_rl.backend.meta import TensorKind
from core_rl.backend.metrics import Metric
from core_rl.config.engine import ModelConfig, OptimizerConfig, ScheduleConfig, TrainEngineConfig
from core_rl.config.layout import ParallelLayout
from core_rl.data.batch import SequenceBatch
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.data.outputs import ModelOutput
from core_rl.launch.group import EngineGroup
from core_rl.reference import ReferenceConfig
from core_rl_fsdp.config import FSDPConfig, FSDPOptions

__all__ = ["TINY", "VOCABULARY", "plain_logprobs"]
OPTIMIZER = OptimizerConfig(
    lr=1e-2, weight_decay=0.1, schedule=ScheduleConfig(type="cosine", total_steps=20, warmup_steps=2)
)


UNEVEN = TINY | {
    "model_type": "llama",
    "hidden_size": 28,
    "intermediate_size": 42,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    "attention_bias": True,
}
"""Four ranks get different numbers of rows, columns and vocabulary entries."""
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "n_embd": 24,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "vocab_size": VOCABULARY,
}
MOE = TINY | {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 3,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "mlp_only_layers": [0],
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}


def fsdp_config(
    layout: int | ParallelLayout,
    dtype: Any = "float32",
    head: Any = "lm",
    model: dict[str, Any] = TINY,
    **options: Any,
) -> FSDPConfig:
    """The FSDP engine; a number is that of data-parallel ranks."""
    return FSDPConfig(
        model=ModelConfig(config=model, head=head),
        optimizer=OPTIMIZER,
        dtype=dtype,
        layout=ParallelLayout(dp=layout) if isinstance(layout, int) else layout,
        options=FSDPOptions(**options),
    )


def reference_config(model: dict[str, Any] = TINY, head: Any = "lm") -> TrainEngineConfig:
    """The reference engine with the same weights and optimizer."""
    return ReferenceConfig(model=ModelConfig(config=model, head=head), optimizer=OPTIMIZER)


def make_batch(seed: int, lengths: tuple[int, ...] = (5, 19, 3, 1, 11, 8, 2)) -> SequenceBatch:
    """Random sequences with a mask and a weight for each token."""
    random = torch.Generator().manual_seed(seed)
    return SequenceBatch.from_sequences(
        [torch.randint(0, VOCABULARY, (n,), generator=random) for n in lengths],
        tokens={
            "loss_mask": [torch.rand(n, generator=random) > 0.3 for n in lengths],
            "weight": [torch.rand(n, generator=random) - 0.3 for n in lengths],
        },
    )


def loss(output: ModelOutput, data: SequenceBatch) -> tuple[Tensor, Mapping[str, Metric]]:
    """A weighted log-likelihood with an entropy term."""
    total = torch.where(
        data.loss_mask, data["weight"] * output["logprobs"] - 0.1 * output["entropy"], 0.0
    ).sum()
    return total, {"weighted": Metric.mean(total, data.loss_mask.sum())}


def squared_values(output: ModelOutput, data: SequenceBatch) -> tuple[Tensor, Mapping[str, Metric]]:
    """A critic's loss."""
    return torch.where(data.loss_mask, (output["values"] - data["weight"]) ** 2, 0.0).sum(), {}


LOSS = LossSpec(fn=loss, outputs=("logprobs", "entropy"), temperature=0.8)
BUDGET = MicroBatchSpec(max_tokens=32)
KINDS: tuple[TensorKind, ...] = ("master", "exp_avg", "exp_avg_sq")


def state(group: EngineGroup) -> dict[str, Tensor]:
    """Weights and moments, as ``KIND/NAME``."""
    return {f"{kind}/{name}": value for kind in KINDS for name, value in group.named_tensors(kind).items()}


def equal(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    """Whether both have the same tensors, bit for bit."""
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def sometimes_raising(output: ModelOutput, data: SequenceBatch) -> tuple[Tensor, Mapping[str, Metric]]:
    """Raises on whichever rank has the token id 60."""
    if bool((data.input_ids == VOCABULARY - 1).any()):
        raise ZeroDivisionError("the loss divides by zero")
    return loss(output, data)


def sometimes_nan(output: ModelOutput, data: SequenceBatch) -> tuple[Tensor, Mapping[str, Metric]]:
    """NaN for whichever rank holds the token id 60."""
    factor = torch.nan if bool((data.input_ids == VOCABULARY - 1).any()) else 1.0
    return output["logprobs"].sum() * factor, {}
