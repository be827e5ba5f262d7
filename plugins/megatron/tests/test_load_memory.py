"""Memory of a rank during and after loading a model."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import megatron_support as support
import pytest
import torch
from memory_probe import peaks_of
from transformers import AutoConfig, AutoModelForCausalLM

from core_rl.backend.protocols import MemoryPart
from core_rl.engine.train import TrainEngine
from core_rl.launch.group import EngineGroup
from core_rl.toolkit import optimizer
from core_rl_megatron.backend import MegatronBackend

MODEL: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 8000,
    "tie_word_embeddings": True,
}
MMAP_THRESHOLD = -3
"""Setting of ``mallopt``: M_MMAP_THRESHOLD of malloc.h."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODEL), dtype=torch.bfloat16)
    model.save_pretrained(path)
    return path


def prepared(engine: TrainEngine) -> None:
    """Let the C library return freed blocks of 1 MiB, and bound what scales with a model that is larger than this."""
    assert ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, 2**20) == 1
    optimizer.GRADIENT_BYTES = 2**22


def kept(engine: TrainEngine) -> int:
    """Bytes of weights, gradients and moments."""
    assert isinstance(engine.backend, MegatronBackend)
    parts: tuple[MemoryPart, ...] = ("weights", "gradients", "optimizer")
    return sum(int(tensor.nbytes) for part in parts for tensor in engine.backend.memory(part))


@pytest.mark.nightly
def test_loading_bounds_peak_memory(directory: Path) -> None:
    first = support.config(layout={"tp": 2}).model_copy(update={"dtype": "bfloat16"})
    model = first.model.model_copy(update={"path": str(directory), "config": None})
    with EngineGroup("megatron", first) as group:
        group.initialize()
        group.run(prepared)
        with peaks_of(group.pids) as loading:
            group.initialize(config=first.model_copy(update={"model": model}))
        for growth, state in zip(loading.growth, group.run(kept), strict=True):
            assert 0.9 * state < growth < 1.15 * state, growth / state
