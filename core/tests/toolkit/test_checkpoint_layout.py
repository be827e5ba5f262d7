"""Checkpoint names and shapes as transformers writes them, for models with fused experts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from core_rl.config.engine import ModelConfig
from core_rl.errors import ConfigError, UnsupportedCapability
from core_rl.toolkit import checkpoint_layout
from core_rl.toolkit.build import build_model
from core_rl.toolkit.checkpoint_layout import CheckpointLayout
from core_rl.toolkit.dtensor import LocalPart
from core_rl.toolkit.meta_build import build_on_meta
from core_rl_conformance.inputs.tiny_vision import CONFIGS

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 28,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "eos_token_id": 1,
    "pad_token_id": None,
}
MOE: dict[str, Any] = {**SIZES, "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 7}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": SIZES,
    "qwen3_moe": {**MOE, "mlp_only_layers": [0]},
    "qwen2_moe": {**MOE, "shared_expert_intermediate_size": 5},
    "mixtral": {**SIZES, "num_local_experts": 3},
    "olmoe": {**SIZES, "num_experts": 3, "num_experts_per_tok": 2},
}


def model(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    built: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **MODELS[kind]))
    return built


def written(built: PreTrainedModel, layout: CheckpointLayout) -> dict[str, Tensor]:
    return {
        name: part
        for parameter, value in built.named_parameters()
        for name, part in layout.cut(parameter, value.detach())
    }


@pytest.mark.parametrize("kind", MODELS)
def test_layout_equals_save_pretrained(kind: str, tmp_path: Path) -> None:
    built = model(kind)
    layout = CheckpointLayout.of(built)
    built.save_pretrained(tmp_path)
    files = load_file(tmp_path / "model.safetensors")
    parts = written(built, layout)
    torch.testing.assert_close(parts, files, rtol=0, atol=0)
    parameters = {name: tuple(parameter.shape) for name, parameter in built.named_parameters()}
    assert layout.shapes(parameters) == {name: tuple(value.shape) for name, value in files.items()}


def test_fused_piece_keeps_no_full_tensor_alive() -> None:
    built = model("qwen3_moe")
    name, fused = next((n, p.detach()) for n, p in built.named_parameters() if n.endswith("gate_up_proj"))
    for _, part in CheckpointLayout.of(built).cut(name, fused):
        assert part.is_contiguous() and part.untyped_storage().nbytes() == part.numel() * part.element_size()


@settings(max_examples=60)
@given(st.data(), st.booleans())
def test_boxes_are_views_at_their_offsets(data: st.DataObject, transposed: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if transposed:
            patch.setattr(checkpoint_layout, "revert_weight_conversion", turned)
        layout = CheckpointLayout.of(BUILT)
    files = written(BUILT, layout)
    name, value = data.draw(st.sampled_from([(n, p.detach()) for n, p in BUILT.named_parameters()]))
    bounds = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in value.shape]
    region = tuple(slice(start, stop) for start, stop in bounds)
    part = LocalPart(value[region], tuple(start for start, _ in bounds))
    boxes = list(layout.local(name, part, tuple(value.shape)))
    for checkpoint_name, offsets, tensor in boxes:
        box = tuple(slice(o, o + n) for o, n in zip(offsets, tensor.shape, strict=True))
        assert torch.equal(tensor, files[checkpoint_name][box])
        assert tensor.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
    assert len({checkpoint_name for checkpoint_name, _, _ in boxes}) == len(boxes)
    assert sum(tensor.numel() for _, _, tensor in boxes) == math.prod(stop - start for start, stop in bounds)


BUILT = model("qwen3_moe")


def turned(_: PreTrainedModel, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """A conversion that transposes fused experts."""
    return {name: value.mT.contiguous() if value.dim() == 3 else value for name, value in parameters.items()}


def vision_mixture(inner: int, directory: Path, *, published: bool) -> ModelConfig:
    """Tiny Qwen3-VL-MoE files, with experts transposed where they are ``published``."""
    fields = CONFIGS["qwen3_vl_moe"]
    config = AutoConfig.for_model(
        "qwen3_vl_moe", **fields | {"text_config": fields["text_config"] | {"moe_intermediate_size": inner}}
    )
    built: PreTrainedModel = AutoModelForImageTextToText.from_config(config)
    state = {
        name: value.mT.contiguous() if published and value.dim() == 3 and ".experts." in name else value
        for name, value in built.state_dict().items()
    }
    built.save_pretrained(directory, state_dict=state, save_original_format=False)
    return ModelConfig(path=str(directory), vision=True)


@pytest.mark.parametrize("published", [True, False])
def test_experts_are_written_as_files_hold_them(published: bool, tmp_path: Path) -> None:
    config = vision_mixture(24, tmp_path, published=published)
    files = load_file(tmp_path / "model.safetensors")
    loaded = build_model(config, seed=0, attn_implementation="eager")
    parts = written(loaded, CheckpointLayout.of(loaded))
    assert parts.keys() == files.keys()
    assert all(torch.equal(parts[name], files[name]) and parts[name].is_contiguous() for name in files)
    unloaded = build_on_meta(config, seed=0, attn_implementation="eager")
    assert unloaded is not None
    shapes = {name: tuple(parameter.shape) for name, parameter in unloaded.model.named_parameters()}
    in_files = {name: tuple(value.shape) for name, value in files.items()}
    assert CheckpointLayout.of(unloaded.model).shapes(shapes) == in_files


@pytest.mark.parametrize("inner", [20, 40])
def test_square_experts_of_published_files_are_refused(inner: int, tmp_path: Path) -> None:
    """transformers takes the square ones for untransposed."""
    config = vision_mixture(inner, tmp_path, published=True)
    for build in (build_model, build_on_meta):
        with pytest.raises(UnsupportedCapability, match="square matrices of experts"):
            build(config, seed=0, attn_implementation="eager")


def test_computing_conversion_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that flattens, or that adds."""
    conversions = {
        "add.* computes|by aten.add": lambda _, parameters: {
            name: value + 1 for name, value in parameters.items()
        },
        "order of elements": lambda _, flat: {name: value.view(-1) for name, value in flat.items()},
        "no cut of": lambda _, parameters: dict(list(parameters.items())[1:]),
    }
    for message, convert in conversions.items():
        monkeypatch.setattr(checkpoint_layout, "revert_weight_conversion", convert)
        with pytest.raises(UnsupportedCapability, match=message):
            CheckpointLayout.of(BUILT)


@pytest.mark.parametrize(
    ("pattern", "frozen"),
    [
        ("*.experts.*", {"gate_up_proj", "down_proj"}),
        ("*.experts.gate_up_proj", {"gate_up_proj"}),
        ("*.experts.*.down_proj.weight", {"down_proj"}),
    ],
)
def test_patterns_match_held_and_written_names(pattern: str, frozen: set[str]) -> None:
    config = {"model_type": "qwen3_moe", **MODELS["qwen3_moe"]}
    built = build_model(ModelConfig(config=config, frozen=(pattern,)), seed=0, attn_implementation="eager")
    still = {name for name, parameter in built.named_parameters() if not parameter.requires_grad}
    assert still == {f"model.layers.1.mlp.experts.{name}" for name in frozen}


@pytest.mark.parametrize("pattern", ["*.experts.0.*", "*.experts.*.gate_proj.weight"])
def test_part_of_fused_parameter_cannot_be_frozen(pattern: str) -> None:
    config = {"model_type": "qwen3_moe", **MODELS["qwen3_moe"]}
    with pytest.raises(ConfigError, match="a part of 'model.layers.1.mlp.experts"):
        build_model(ModelConfig(config=config, frozen=(pattern,)), seed=0, attn_implementation="eager")
