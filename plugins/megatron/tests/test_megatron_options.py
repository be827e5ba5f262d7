"""Options that a model, the other fields or this machine do not allow: refused together, before any group is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import megatron_support as support
import pytest
import torch
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.identity_op import IdentityOp
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from core_rl.engine.loading import load_engine
from core_rl.errors import ConfigError
from core_rl.toolkit.checkpoint_layout import CheckpointLayout
from core_rl_megatron import modules
from core_rl_megatron.config import MegatronConfig
from core_rl_megatron.modules import RMSNorm
from core_rl_megatron.naming import boxes_of
from core_rl_megatron.options import check_options, groups_experts, uses_fusions
from core_rl_megatron.rotary import rotated
from core_rl_megatron.translation import transformer_config

Fields = Mapping[str, Any]
TE = {"transformer_impl": "transformer_engine"}
LORA = {"lora": {"rank": 2}}
REFUSED: list[tuple[Fields, Fields, Fields, str]] = [
    ({"overlap_param_gather": True}, {}, {}, "set it to false, or distributed_optimizer to true"),
    ({"ddp_bucket_size": 10, "overlap_grad_reduce": False}, {}, {}, "ddp_bucket_size = 10 without overlap"),
    ({"moe_grouped_gemm": True}, {}, {}, "this 'qwen3' model has no experts; leave it out"),
    (
        {"moe_grouped_gemm": True},
        support.MOE | {"moe_intermediate_size": 20},
        {},
        "sizes that 8 divides, and this model has moe_intermediate_size=20",
    ),
    (
        TE,
        {},
        {},
        "needs the package transformer-engine.*pip install 'transformer-engine.*or set transformer_impl to 'local'",
    ),
    (TE, {}, {}, "runs on CUDA alone, and device is the CPU"),
    (TE, {}, LORA, r"no adapters \(model.lora\)"),
]


def built(options: Fields, model: Fields, section: Fields) -> MegatronConfig:
    actual = support.config(options=options, model=model, **section)
    assert isinstance(actual, MegatronConfig)
    return actual


@pytest.mark.parametrize(("options", "model", "section", "says"), REFUSED, ids=[row[-1] for row in REFUSED])
def test_options_are_refused_by_name(options: Fields, model: Fields, section: Fields, says: str) -> None:
    config = built(options, model, section)
    with pytest.raises(ConfigError, match=f"(?s)options of the engine 'megatron'.*{says}"):
        check_options(config, AutoConfig.for_model(**(config.model.config or {})))


def test_option_errors_are_gathered_early() -> None:
    wrong = {**TE, "overlap_param_gather": True, "moe_grouped_gemm": True}
    engine = load_engine("megatron", support.config(options=wrong))
    with pytest.raises(ConfigError, match="4 problems") as raised:
        engine.initialize()
    assert not mpu.model_parallel_is_initialized()
    assert all(name in str(raised.value) for name in ("overlap_param_gather", "moe_grouped_gemm", "package"))


@pytest.mark.parametrize(
    ("missing", "compiler", "says"),
    [("triton", "gcc", "there is no triton"), ("", None, "there is no C compiler")],
)
def test_cuda_fusions_need_a_compiler(
    missing: str, compiler: str | None, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("shutil.which", lambda name: compiler)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == missing else object())
    requested = built({"fusions": True}, {}, {}).model_copy(update={"device": "auto"})
    with pytest.raises(ConfigError, match=says):
        check_options(requested, AutoConfig.for_model("qwen3"))
    assert not uses_fusions(built({}, {}, {}).model_copy(update={"device": "auto"}))


def test_defaults_follow_model_and_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    config = built({}, {}, {})
    assert not groups_experts(config, AutoConfig.for_model("qwen3"))
    assert groups_experts(config, AutoConfig.for_model(**support.TINY | support.MOE))
    assert not groups_experts(
        config, AutoConfig.for_model(**support.TINY | support.MOE | {"hidden_size": 20})
    )
    assert not uses_fusions(config)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("shutil.which", lambda name: name)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert uses_fusions(config.model_copy(update={"device": "auto"}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_norm_equals_plain_norm(dtype: torch.dtype) -> None:
    config = transformer_config(built({}, {}, {}), AutoConfig.for_model(**support.TINY))
    plain = RMSNorm(config, 24, 1e-5).to(dtype)
    config.bias_activation_fusion = True
    fused = RMSNorm(config, 24, 1e-5).to(dtype)
    hidden = torch.randn(5, 1, 24, dtype=dtype) * 3
    with torch.no_grad():
        fused.weight.uniform_(0.5, 2.0)
        plain.weight.copy_(fused.weight)
    torch.testing.assert_close(fused(hidden), plain(hidden))


def test_tokens_are_turned_by_their_angles() -> None:
    """Match the rotation of transformers."""
    angles = torch.rand(7, 3).repeat(1, 2)
    value = torch.randn(7, 1, 4, 6)
    expected, _ = apply_rotary_pos_emb(
        value.permute(1, 2, 0, 3), value.permute(1, 2, 0, 3), angles.cos()[None], angles.sin()[None]
    )
    actual = rotated(value, angles.cos()[:, None, None], angles.sin()[:, None, None])
    torch.testing.assert_close(actual.permute(1, 2, 0, 3), expected)


class _Layer(nn.Module):
    """Parameters of a layer of TransformerEngine's spec: norms are inside the linear layers after them."""

    layer_number = 1

    def __init__(self, *, experts: bool) -> None:
        super().__init__()
        sizes = {
            "self_attention.linear_qkv.layer_norm_weight": (24,),
            "self_attention.linear_qkv.weight": (48, 24),
            "self_attention.q_layernorm.weight": (6,),
            "self_attention.k_layernorm.weight": (6,),
            "self_attention.linear_proj.weight": (24, 24),
        }
        dense = {
            "mlp.linear_fc1.layer_norm_weight": (24,),
            "mlp.linear_fc1.weight": (80, 24),
            "mlp.linear_fc2.weight": (24, 40),
        }
        mixed = {
            "pre_mlp_layernorm.weight": (24,),
            "mlp.router.weight": (6, 24),
            "mlp.experts.linear_fc1.weight": (6 * 32, 24),
            "mlp.experts.linear_fc2.weight": (6 * 24, 16),
        }
        for name, size in (sizes | (mixed if experts else dense)).items():
            module: nn.Module = self
            *path, last = name.split(".")
            for part in path:
                if part not in module._modules:
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            module.register_parameter(last, nn.Parameter(torch.empty(size)))


@pytest.mark.parametrize("experts", [False, True])
def test_transformer_engine_names_match_transformers(experts: bool) -> None:
    fields = support.TINY | (support.MOE if experts else {}) | {"num_hidden_layers": 1}
    config = AutoConfig.for_model(**fields)
    chunk: Any = nn.Module()
    chunk.config = transformer_config(built({}, fields, {}), config)
    chunk.decoder = nn.Module()
    chunk.decoder.layers = nn.ModuleList([_Layer(experts=experts)])
    actual = {
        box.name: (box.stop - box.start, *parameter.shape[1:])
        if len(boxes) == 1 or "experts" in box.name
        else None
        for parameter, boxes in boxes_of(chunk, 0, 0)
        for box in boxes
    }
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = CheckpointLayout.of(model).shapes({n: tuple(p.shape) for n, p in model.named_parameters()})
    expected = {name: shape for name, shape in shapes.items() if ".layers." in name}
    assert actual.keys() == expected.keys()
    assert all(shape is None or shape == expected[name] for name, shape in actual.items())


def test_norms_of_transformer_engine_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm of this package in front of a layer that has its own would normalise twice."""
    requested: list[bool] = []

    def spec(config: Any, use_transformer_engine: bool, **rest: Any) -> Any:
        requested.append(use_transformer_engine)
        block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, **rest)
        for layer in block.layer_specs:
            layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = IdentityOp
        return block

    monkeypatch.setattr(modules, "get_gpt_decoder_block_spec", spec)
    model = AutoConfig.for_model(**support.TINY)
    config = transformer_config(built({}, {}, {}), model)
    monkeypatch.setattr("megatron.core.parallel_state.get_pipeline_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(mpu, "get_pipeline_model_parallel_world_size", lambda: 1)
    for name in ("transformer_engine", "local"):
        config.transformer_impl = name
        block = modules._block_spec(config, model, None, grouped=False)
        for layer in (spec.submodules for spec in block.layer_specs):
            assert (layer.input_layernorm is IdentityOp) is (name == "transformer_engine")
            assert (layer.pre_mlp_layernorm is IdentityOp) is (name == "transformer_engine")
            assert layer.self_attention.submodules.core_attention is modules.PackedCoreAttention
    assert requested == [True, False]
