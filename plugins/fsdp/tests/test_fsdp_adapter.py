"""LoRA on the FSDP engine: `peft` reads its saves, and memory savers and layouts change nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsdp_support as support
import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from core_rl.backend.loss import LossSpec
from core_rl.backend.meta import SaveLoadMeta
from core_rl.config.engine import LoraConfig, ModelConfig
from core_rl.data.batch import SequenceBatch
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.errors import BatchError, CheckpointMismatch
from core_rl.launch.group import EngineGroup
from core_rl.reference import ReferenceConfig
from core_rl_fsdp.config import FSDPConfig

LOSS, BUDGET = support.LOSS, support.BUDGET
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


@pytest.mark.sampled(4)
@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
@pytest.mark.parametrize("targets", ["all-linear", "one layer"])
def test_peft_loads_saved_adapter(group: EngineGroup, tmp_path: Path, family: str, targets: str) -> None:
    path = write_base(tmp_path / "base", support.TINY if family == "qwen3" else GPT2)
    layer = "model.layers.1.self_attn.q_proj" if family == "qwen3" else "transformer.h.1.mlp.c_proj"
    lora = (
        LORA if targets == "all-linear" else LoraConfig(rank=2, alpha=3, rslora=True, target_modules=(layer,))
    )
    group.initialize(config=config_of(path, lora=lora))
    train(group, 0, 3)
    batch = support.make_batch(5)
    local = group.forward(batch, BUDGET)["logprobs"]
    group.save(meta(tmp_path / "adapter"))
    written = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] is None  # a directory of this machine
    if targets == "all-linear":
        assert set(written["target_modules"]) == (
            {"c_attn", "c_fc", "c_proj"}
            if family == "gpt2"
            else {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
        )
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(model, tmp_path / "adapter")
    with torch.no_grad():
        theirs = support.plain_logprobs(adapted, batch)
        torch.testing.assert_close(local, theirs, rtol=1e-5, atol=1e-5)
        group.save(SaveLoadMeta(path=str(tmp_path / "merged"), format="hf"))
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
        torch.testing.assert_close(local, support.plain_logprobs(merged, batch), rtol=1e-5, atol=1e-5)
    assert merged.get_output_embeddings().weight is merged.get_input_embeddings().weight
    assert (local - group_without(group, path, batch)).abs().max() > 1e-3


def group_without(group: EngineGroup, path: Path, batch: SequenceBatch) -> torch.Tensor:
    """Log-probs without the adapter equal an engine without adapters."""
    with group.disable_adapter():
        off: torch.Tensor = group.forward(batch, BUDGET)["logprobs"]
    group.initialize(config=config_of(path, lora=None))
    assert torch.equal(off, group.forward(batch, BUDGET)["logprobs"])
    return off


@pytest.mark.nightly
def test_peft_adapter_initializes_training(group: EngineGroup, base: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = PeftConfig(r=4, lora_alpha=9, target_modules=["v_proj", "down_proj"], task_type="CAUSAL_LM")
    adapted = get_peft_model(model, config)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.2)
    adapted.save_pretrained(str(tmp_path / "adapter"))
    lora = LoraConfig(rank=4, alpha=9, target_modules=("v_proj", "down_proj"), path=str(tmp_path / "adapter"))
    group.initialize(config=config_of(base, dp=4, lora=lora))
    batch = support.make_batch(2)
    with torch.no_grad():
        theirs = support.plain_logprobs(adapted, batch)
    torch.testing.assert_close(group.forward(batch, BUDGET)["logprobs"], theirs, rtol=1e-5, atol=1e-5)
    with pytest.raises(CheckpointMismatch, match=r"2 problems:(.|\n)*set it to 4(.|\n)*set it to 9"):
        group.initialize(config=config_of(base, lora=lora.model_copy(update={"rank": 2, "alpha": 4})))


def test_a_critics_adapter_holds_its_head(group: EngineGroup, base: Path, tmp_path: Path) -> None:
    group.initialize(config=config_of(base, head="value"))
    loss = LossSpec(fn=support.squared_values, outputs=("values",))
    for step in range(2):
        group.train_batch(support.make_batch(step), loss, BUDGET)
    group.save(meta(tmp_path / "adapter"))
    batch = support.make_batch(4)
    local = group.forward(batch, BUDGET, ("values",))["bootstrap"]
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, dtype=torch.float32)
    model.config.pad_token_id = 0
    adapted = PeftModel.from_pretrained(model, tmp_path / "adapter")
    with torch.no_grad():
        trunk: Any = adapted.base_model.model
        states = [
            trunk.model(ids[None]).last_hidden_state[0, -1] for ids in batch.input_ids.split(batch.lengths)
        ]
        theirs = torch.cat([trunk.score(state) for state in states])
    torch.testing.assert_close(local, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("dp", [1, 2])
def test_gradient_checkpointing_changes_no_gradient(group: EngineGroup, base: Path, dp: int) -> None:
    actual = []
    for checkpointing in (False, True):
        group.initialize(config=config_of(base, dp, gradient_checkpointing=checkpointing))
        train(group, 0, 1)  # B is 0 before, and A has no gradient
        group.forward_backward(support.make_batch(1), LOSS, BUDGET)
        actual.append(group.named_tensors("grads"))
    assert all(bool(grad.any()) for grad in actual[0].values())
    torch.testing.assert_close(*actual, rtol=1e-5, atol=1e-7)


def test_bfloat16_trains_float32_factors(group: EngineGroup, base: Path) -> None:
    group.initialize(config=config_of(base, dtype="bfloat16"))
    before = group.named_tensors("adapter")
    train(group, 0, 3)
    after = group.named_tensors("adapter")
    assert {value.dtype for value in after.values()} == {torch.float32}
    moved = torch.cat([(after[name] - before[name]).flatten() for name in before])
    assert not torch.equal(moved, moved.bfloat16().float()) and bool(moved.any())
    assert {value.dtype for value in group.named_tensors("params").values()} == {torch.bfloat16}


def test_adapter_training_moves_to_reference_engine(group: EngineGroup, base: Path, tmp_path: Path) -> None:
    group.initialize(config=config_of(base))
    train(group, 0, 2)
    saved = SaveLoadMeta(path=str(tmp_path / "portable"), format="portable")
    group.save(saved)
    group.save(meta(tmp_path / "adapter"))
    losses = train(group, 2, 4)
    config = ReferenceConfig(model=ModelConfig(path=str(base), lora=LORA), optimizer=support.OPTIMIZER)
    with EngineGroup("reference", config) as plain:
        plain.load(saved)
        assert train(plain, 2, 4) == pytest.approx(losses, rel=1e-4)
        plain.load(meta(tmp_path / "adapter"))  # the digest of the base is the same on two ranks and on one


def test_error_in_context_restores_adapter(group: EngineGroup, base: Path) -> None:
    group.initialize(config=config_of(base))
    train(group, 0, 2)
    batch = support.make_batch(3)
    adapted = group.forward(batch, BUDGET)["logprobs"]
    with pytest.raises(BatchError, match="max_tokens is 2"), group.disable_adapter():
        group.forward(batch, MicroBatchSpec(max_tokens=2))
    assert torch.equal(group.forward(batch, BUDGET)["logprobs"], adapted)
