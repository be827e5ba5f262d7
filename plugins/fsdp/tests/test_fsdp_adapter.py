"""LoRA on the FSDP engine: `peft` reads what it saves, and memory savers and layouts change nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsdp_support as support
import pytest
import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM

from core_rl.config.engine import LoraConfig, ModelConfig
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.engines.loss import LossSpec
from core_rl.engines.meta import SaveLoadMeta
from core_rl.launch.group import EngineGroup
from core_rl_fsdp.config import FSDPConfig

LOSS = LossSpec(fn=support.loss, outputs=("logprobs", "entropy"), temperature=0.8)
BUDGET = MicroBatchSpec(max_tokens=32)
LORA = LoraConfig(rank=3, alpha=7)
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "n_embd": 24,
    "n_layer": 2,
    "n_head": 3,
    "n_positions": 64,
    "vocab_size": support.VOCABULARY,
}


@pytest.fixture(scope="module")
def group() -> Iterator[EngineGroup]:
    """Four ranks that every test initialises as it needs."""
    with EngineGroup("fsdp", support.fsdp_config(4), timeout_s=120) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory."""
    return write_base(tmp_path_factory.mktemp("base"), support.TINY)


def write_base(path: Path, config: dict[str, Any], seed: int = 0) -> Path:
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).save_pretrained(path)
    return path


def config_of(base: Path, dp: int = 2, lora: LoraConfig | None = LORA, **changes: Any) -> FSDPConfig:
    model = ModelConfig(path=str(base), lora=lora, head=changes.pop("head", "lm"))
    return support.fsdp_config(dp, **changes).model_copy(update={"model": model})


def train(group: EngineGroup, first: int, last: int) -> list[float]:
    return [group.train_batch(support.make_batch(step), LOSS, BUDGET)["loss"] for step in range(first, last)]


def meta(path: Path) -> SaveLoadMeta:
    return SaveLoadMeta(path=str(path), format="adapter")


def plain_logprobs(model: Any, batch: Any) -> torch.Tensor:
    rows = []
    for ids in batch.input_ids.split(batch.lengths):
        logits = model(input_ids=ids[None]).logits[0].float().log_softmax(-1)
        rows.append(torch.cat([torch.zeros(1), logits[:-1].gather(1, ids[1:, None])[:, 0]]))
    return torch.cat(rows)


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
@pytest.mark.parametrize("targets", ["all-linear", "one layer"])
def test_peft_loads_what_is_saved_and_gives_the_same_logprobs(
    group: EngineGroup, tmp_path: Path, family: str, targets: str
) -> None:
    path = write_base(tmp_path / "base", support.TINY if family == "qwen3" else GPT2)
    layer = "model.layers.1.self_attn.q_proj" if family == "qwen3" else "transformer.h.1.mlp.c_proj"
    lora = (
        LORA if targets == "all-linear" else LoraConfig(rank=2, alpha=3, rslora=True, target_modules=(layer,))
    )
    group.initialize(config=config_of(path, lora=lora))
    train(group, 0, 3)
    batch = support.make_batch(5)
    own = group.forward(batch, BUDGET)["logprobs"]
    group.save(meta(tmp_path / "adapter"))
    written = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == str(path)
    if targets == "all-linear":
        assert set(written["target_modules"]) == (
            {"c_attn", "c_fc", "c_proj"}
            if family == "gpt2"
            else {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
        )
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(model, tmp_path / "adapter")
    with torch.no_grad():
        theirs = plain_logprobs(adapted, batch)
        torch.testing.assert_close(own, theirs, rtol=1e-5, atol=1e-5)
        group.save(SaveLoadMeta(path=str(tmp_path / "merged"), format="hf"))
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
        torch.testing.assert_close(own, plain_logprobs(merged, batch), rtol=1e-5, atol=1e-5)
    assert merged.get_output_embeddings().weight is merged.get_input_embeddings().weight
    assert not (own - group_without(group, path, batch)).abs().max() < 1e-3


def group_without(group: EngineGroup, path: Path, batch: Any) -> torch.Tensor:
    with group.disable_adapter():
        off = group.forward(batch, BUDGET)["logprobs"]
    group.initialize(config=config_of(path, lora=None))
    assert torch.equal(off, group.forward(batch, BUDGET)["logprobs"])
    return off
