"""The engine on two ranks against the plain model, and the conformance suite in its quick form."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from core_rl_ddp import SPEC
from core_rl_ddp.config import DDPConfig
from torch import Tensor

from core_rl.backend.loss import LossSpec, count_tokens
from core_rl.backend.metrics import Metric
from core_rl.config.engine import ModelConfig, TrainEngineConfig
from core_rl.config.layout import ParallelLayout
from core_rl.data.batch import SequenceBatch
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.data.outputs import ModelOutput, masked_sum
from core_rl.launch.group import EngineGroup
from core_rl.reference import ReferenceConfig
from core_rl.registry.engines import get_spec
from core_rl.registry.spec import EngineSpec

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


def batch() -> SequenceBatch:
    """Random sequences of unequal lengths, in which some tokens are not trained."""
    lengths = (5, 19, 3, 11, 8, 2)
    random = torch.Generator().manual_seed(0)
    return SequenceBatch.from_sequences(
        [torch.randint(0, VOCABULARY, (n,), generator=random) for n in lengths],
        tokens={"loss_mask": [torch.rand(n, generator=random) > 0.3 for n in lengths]},
    )


def negative_log_likelihood(output: ModelOutput, batch: SequenceBatch) -> tuple[Tensor, dict[str, Metric]]:
    """The sum of a loss over the trained tokens; the engine divides by the number of all of them."""
    return -masked_sum(output["logprobs"], batch.loss_mask), {}


def gradients(spec: EngineSpec, config: TrainEngineConfig) -> dict[str, Tensor]:
    """The gradients of one batch, cut into several micro-batches."""
    with EngineGroup(spec, config, timeout_s=120) as group:
        group.forward_backward(
            batch(),
            LossSpec(fn=negative_log_likelihood, weight_fn=count_tokens),
            MicroBatchSpec(max_tokens=24),
        )
        return group.named_tensors("grads")


def test_gradients_on_two_ranks_equal_the_plain_model() -> None:
    model = ModelConfig(config=TINY)
    expected = gradients(get_spec("reference"), ReferenceConfig(model=model))
    actual = gradients(SPEC, DDPConfig(model=model, layout=ParallelLayout(dp=2)))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)


def test_the_conformance_suite_passes(tmp_path: Path) -> None:
    arguments = ["--engine=ddp", "--quick", "-p", "no:cacheprovider", "--pyargs", "core_rl_conformance"]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
