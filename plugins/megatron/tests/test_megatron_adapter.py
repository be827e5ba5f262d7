"""LoRA on the Megatron engine: `peft` reads the saves of each layout, and recomputation draws the same dropout."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import megatron_support as support
import pytest
import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM

from core_rl.backend.loss import LossSpec
from core_rl.backend.meta import SaveLoadMeta
from core_rl.config.base import parse_config
from core_rl.config.engine import TrainEngineConfig
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.engine.train import TrainEngine
from core_rl.launch.group import EngineGroup
from core_rl.toolkit.build import build_model
from core_rl.toolkit.lora import checkpoint_name
from core_rl_megatron.backend import MegatronBackend
from core_rl_megatron.config import MegatronConfig

LOSS = LossSpec(fn=support.weighted_nll)
CUT = MicroBatchSpec(max_tokens=24)
TP_SP = {"tp": 2, "sequence_parallel": True}
LORA: dict[str, Any] = {"rank": 3, "alpha": 7}
LAST_LAYER: dict[str, Any] = {
    **LORA,
    "target_modules": ["model.layers.3.self_attn.k_proj", "model.layers.3.mlp.up_proj"],
}
"""Parts of fused layers; the first pipeline stage trains nothing."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory."""
    path = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**support.TINY)).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def group(base: Path) -> Iterator[EngineGroup]:
    """Two ranks that every test initializes as it needs."""
    with EngineGroup("megatron", config(base, {"dp": 2}), timeout_s=120) as ranks:
        yield ranks


def config(
    base: Path, layout: dict[str, Any], lora: dict[str, Any] | None = None, **options: Any
) -> TrainEngineConfig:
    values = {
        "model": {"path": str(base), "lora": lora},
        "optimizer": support.OPTIMIZER,
        "layout": layout,
        "device": "cpu",
        "options": options,
    }
    return parse_config(MegatronConfig, values, "a test's config")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("layout", "lora"), [({"tp": 2}, LORA), (TP_SP, LORA), ({"pp": 2}, LAST_LAYER)], ids=["tp", "sp", "pp"]
)
def test_peft_loads_adapter_of_any_layout(
    group: EngineGroup, base: Path, tmp_path: Path, layout: dict[str, Any], lora: dict[str, Any]
) -> None:
    selected = config(base, layout, lora)
    group.initialize(config=selected)
    drawn = build_model(selected.model, seed=selected.seed, attn_implementation="eager").named_parameters()
    factors = {checkpoint_name(name): value.detach() for name, value in drawn if ".lora_" in name}
    torch.testing.assert_close(group.named_tensors("adapter"), factors, rtol=0, atol=0)
    for step in range(2):
        group.train_batch(support.batch(step), LOSS, CUT)
    batch = support.batch(5)
    local = group.forward(batch, CUT)["logprobs"]
    group.save(SaveLoadMeta(path=str(tmp_path / "adapter"), format="adapter"))
    with group.disable_adapter():
        off = group.forward(batch, CUT)["logprobs"]
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(model, tmp_path / "adapter")
    with torch.no_grad():
        torch.testing.assert_close(local, support.plain_logprobs(adapted, batch), rtol=1e-5, atol=1e-5)
    assert (local - off).abs().max() > 1e-3
    group.initialize(config=config(base, layout))
    assert torch.equal(off, group.forward(batch, CUT)["logprobs"])


@pytest.mark.nightly
@pytest.mark.parametrize("layout", [{"tp": 2}, TP_SP], ids=["tp", "sp"])
def test_recomputation_draws_the_dropout_of_the_adapter_again(
    group: EngineGroup, base: Path, layout: dict[str, Any]
) -> None:
    actual = []
    for recompute in ("none", "full"):
        group.initialize(config=config(base, layout, {**LORA, "dropout": 0.4}, recompute=recompute))
        group.train_batch(support.batch(0), LOSS, CUT)  # B is 0 before, and A has no gradient
        group.forward_backward(support.batch(1), LOSS, CUT)
        actual.append(group.named_tensors("grads"))
    assert all(bool(grad.any()) for grad in actual[0].values())
    torch.testing.assert_close(actual[1], actual[0], rtol=1e-5, atol=1e-7)


def weight_bytes(engine: TrainEngine) -> int:
    assert isinstance(engine.backend, MegatronBackend)
    return sum(tensor.nbytes for tensor in engine.backend.memory("weights"))


def test_ranks_without_cuda_start_without_inductor(group: EngineGroup) -> None:
    """Skip inductor, whose import would be three quarters of a rank's start."""
    assert group.run(support.has_imported, "torch._inductor.compile_fx") == [False, False]


def test_bfloat16_plan_counts_float32_copies_of_frozen_weights(group: EngineGroup, base: Path) -> None:
    selected = config(base, {"dp": 2}, LORA).model_copy(update={"dtype": "bfloat16"})
    group.initialize(config=selected)
    sizes = [
        sum(value.numel() for value in group.named_tensors(kind).values()) for kind in ("master", "adapter")
    ]
    assert group.run(weight_bytes) == [selected.state_bytes(*sizes).weights] * 2


def test_forward_only_weights_use_compute_dtype(group: EngineGroup, base: Path) -> None:
    """A third of the memory, and the same results."""
    trained = config(base, {"dp": 2}, None).model_copy(update={"dtype": "bfloat16"})
    actual, stored = [], []
    for selected in (trained, trained.model_copy(update={"optimizer": None})):
        group.initialize(config=selected)
        actual.append(group.forward(support.batch(), CUT)["logprobs"])
        stored.append(group.run(weight_bytes))
    count = sum(value.numel() for value in group.named_tensors("master").values())
    assert torch.equal(*actual)
    assert stored[1] == [2 * count] * 2 == [selected.state_bytes(count, 0).weights] * 2
