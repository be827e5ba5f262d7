"""Checkpoints in torch's distributed format, which torchtitan loads by its own adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import titan_support as support
import torch
from torch.distributed.checkpoint.state_dict_loader import load
from transformers import AutoConfig

from core_rl.backend.loss import LossSpec
from core_rl.backend.meta import SaveLoadMeta
from core_rl.config.layout import ParallelLayout
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl_torchtitan.translation import adapter_of, decoder_config


@pytest.mark.parametrize("engine", ["fsdp", "torchtitan"])
@pytest.mark.parametrize("fields", [support.TINY, support.LLAMA], ids=["qwen3", "llama"])
def test_torchtitan_loads_a_saved_run(engine: str, fields: dict[str, Any], tmp_path: Path) -> None:
    group = support.started(support.config(engine, layout={"dp": 2}, model=fields), engine)
    try:
        group.train_batch(support.batch(), LossSpec(fn=support.weighted_nll), MicroBatchSpec(max_tokens=64))
        group.save(SaveLoadMeta(path=str(tmp_path / "run"), format="portable"))
        expected = group.named_tensors("master")
    finally:
        group.close()
    decoder = decoder_config(AutoConfig.for_model(**fields), ParallelLayout(), "lm").build()
    adapter = adapter_of(decoder.config)
    # The steps of `CheckpointManager.dcp_load`.
    state = adapter.to_hf(decoder.state_dict())
    load(state, checkpoint_id=str(tmp_path / "run"))
    decoder.load_state_dict(adapter.from_hf(state))
    loaded = adapter.to_hf(decoder.state_dict())
    for name, value in expected.items():
        assert torch.equal(loaded[name], value), name
