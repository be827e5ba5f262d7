"""The engine on two ranks against the plain model, and the conformance suite in its quick form."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from core_rl_tiny import SPEC
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from core_rl.backend.loss import LossSpec
from core_rl.backend.metrics import Metric
from core_rl.config.engine import ModelConfig, TrainEngineConfig
from core_rl.config.layout import ParallelLayout
from core_rl.data.batch import SequenceBatch
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.data.outputs import ModelOutput, masked_sum
from core_rl.engine.loading import load_engine
from core_rl.errors import ConfigError, UnsupportedCapability
from core_rl.launch.group import EngineGroup
from core_rl.reference import ReferenceConfig
from core_rl.registry.engines import get_spec
from core_rl.registry.spec import EngineSpec

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "max_position_embeddings": 64,
}


def negative_log_likelihood(output: ModelOutput, batch: SequenceBatch) -> tuple[Tensor, Mapping[str, Metric]]:
    return -masked_sum(output["logprobs"], batch.loss_mask), {}


def gradients(spec: EngineSpec, config: TrainEngineConfig) -> dict[str, Tensor]:
    lengths, random = (5, 19, 3, 11, 8, 2), torch.Generator().manual_seed(0)
    batch = SequenceBatch.from_sequences(
        [torch.randint(0, 61, (n,), generator=random) for n in lengths],
        tokens={"loss_mask": [torch.rand(n, generator=random) > 0.3 for n in lengths]},
    )
    with EngineGroup(spec, config, timeout_s=120) as group:
        group.forward_backward(batch, LossSpec(fn=negative_log_likelihood), MicroBatchSpec(max_tokens=24))
        return group.named_tensors("grads")


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_on_two_ranks_equal_the_plain_model(tied: bool, tmp_path: Path) -> None:
    settings = AutoConfig.for_model(**LLAMA, tie_word_embeddings=tied)
    AutoModelForCausalLM.from_config(settings, dtype=torch.float32).save_pretrained(tmp_path)
    model = ModelConfig(path=str(tmp_path))
    expected = gradients(get_spec("reference"), ReferenceConfig(model=model))
    actual = gradients(SPEC, TrainEngineConfig(model=model, layout=ParallelLayout(dp=2)))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("changes", [{"model_type": "qwen3"}, {"attention_bias": True}])
def test_checkpoint_of_different_model_is_refused(changes: dict[str, Any]) -> None:
    engine = load_engine(SPEC, TrainEngineConfig(model=ModelConfig(config=LLAMA | changes)))
    with pytest.raises(UnsupportedCapability, match="plain models of type 'llama'"):
        engine.initialize()


def test_mismatched_weights_are_refused(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA)).save_pretrained(tmp_path)
    AutoConfig.for_model(**LLAMA | {"intermediate_size": 41}).save_pretrained(tmp_path)
    engine = load_engine(SPEC, TrainEngineConfig(model=ModelConfig(path=str(tmp_path))))
    with pytest.raises(ConfigError, match=r"gate_proj.weight' is \[40, 24\]; the model has \[41, 24\]"):
        engine.initialize()


@pytest.mark.nightly
def test_the_conformance_suite_passes(tmp_path: Path) -> None:
    arguments = ["--engine=tiny", "--quick", "-p", "no:cacheprovider", "--pyargs", "core_rl_conformance"]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
