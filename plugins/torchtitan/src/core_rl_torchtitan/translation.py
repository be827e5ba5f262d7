"""torchtitan's config of a transformers model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torchtitan.models.common import ComplexRoPE, CosSinRoPE, RMSNorm, RoPE, TransformerBlock
from torchtitan.models.common.config_utils import (
    make_ffn_config,
    make_gqa_config,
    make_moe_config,
    make_router_config,
    make_token_dispatcher_config,
)
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.moe import RoutedExperts
from torchtitan.models.llama3 import Llama3Model
from torchtitan.models.llama3.model import Llama3TransformerBlock
from torchtitan.models.llama3.sharding import set_llama3_sharding_config
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.models.qwen3 import Qwen3Model
from torchtitan.models.qwen3.model import Qwen3TransformerBlock
from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
from torchtitan.protocols.state_dict_adapter import StateDictAdapter
from transformers import PretrainedConfig

from core_rl.config.engine import Head
from core_rl.config.layout import ParallelLayout
from core_rl.errors import LayoutError, UnsupportedCapability, raise_all
from core_rl.toolkit.attention import check_heads, head_size
from core_rl_torchtitan.modules import Experts, OutputHead, PackedAttention, PackedEmbedding

FAMILIES = ("llama", "qwen3", "qwen3_moe")
NO_INIT: dict[str, Any] = {}
"""torchtitan draws no weights: all are loaded."""


def check_model_layout(model: PretrainedConfig, layout: ParallelLayout) -> None:
    """Raise `UnsupportedCapability` for a model that torchtitan lacks, or `LayoutError` for a ``layout`` of it."""
    if model.model_type not in FAMILIES:
        raise UnsupportedCapability(
            f"the engine 'torchtitan' has no mapping for the model family {model.model_type!r}; "
            f"it knows {', '.join(FAMILIES)}: use these, or the engine 'fsdp'"
        )
    raise_all(UnsupportedCapability, f"this {model.model_type!r} model", _variants(model))
    misfits = list(layout.misfits(model))
    if getattr(model, "num_experts", None) and layout.tp > 1:
        misfits.append(
            f"tp={layout.tp} for a mixture of experts, which was not tried; set tp to 1, and ep or cp above"
        )
    raise_all(LayoutError, f"layout {layout} of this {model.model_type!r} model", misfits)
    check_heads(model.num_attention_heads // layout.tp, layout.cp)


def _variants(model: PretrainedConfig) -> Iterator[str]:
    """Settings of a known family that torchtitan's modules lack."""
    if model.hidden_act != "silu":
        yield f"hidden_act={model.hidden_act!r}; torchtitan knows 'silu'"
    for name in ("attention_bias", "mlp_bias"):
        if getattr(model, name, False):
            yield f"{name}=True; torchtitan has no such bias"
    if any(kind != "full_attention" for kind in getattr(model, "layer_types", None) or ()):
        yield "sliding attention in some layers; torchtitan's models have full attention"
    if model.attention_dropout:
        yield f"attention_dropout={model.attention_dropout}; torchtitan has no dropout"
    known = ("default", "llama3") if model.model_type == "llama" else ("default",)
    rope = model.rope_parameters
    if rope["rope_type"] not in known:
        yield f"rope_type={rope['rope_type']!r}; torchtitan computes {', '.join(known)} as transformers does"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        yield f"partial_rotary_factor={rope['partial_rotary_factor']}; torchtitan turns all of each head"


def decoder_config(model: PretrainedConfig, layout: ParallelLayout, head: Head) -> Decoder.Config:
    """Torchtitan's config of ``model``, with shardings of ``layout``; raises as `check_model_layout`."""
    check_model_layout(model, layout)
    classes: dict[str, type[Decoder]] = {"llama": Llama3Model}
    dim, rows = model.hidden_size, model.vocab_size
    config = classes.get(model.model_type, Qwen3Model).Config(
        dim=dim,
        vocab_size=rows,
        tok_embeddings=PackedEmbedding.Config(
            num_embeddings=rows, embedding_dim=dim, padding_id=model.pad_token_id
        ),
        norm=_norm(model, dim),
        lm_head=OutputHead.Config(in_features=dim, out_features=rows),
        layers=[_layer(model, number) for number in range(model.num_hidden_layers)],
        enable_weight_tying=head == "lm" and bool(model.tie_word_embeddings),
    )
    if model.model_type == "llama":
        set_llama3_sharding_config(config, enable_sp=layout.sequence_parallel)
    else:
        set_qwen3_sharding_config(config, enable_sp=layout.sequence_parallel, enable_ep=layout.ep > 1)
    return config


def adapter_of(config: Decoder.Config) -> StateDictAdapter:
    """Torchtitan's own conversion to the names and the order of rows that transformers has."""
    adapter = Llama3StateDictAdapter if isinstance(config, Llama3Model.Config) else Qwen3StateDictAdapter
    return adapter(config, None)


def _norm(model: PretrainedConfig, size: int) -> RMSNorm.Config:
    return RMSNorm.Config(normalized_shape=size, eps=model.rms_norm_eps)


def _layer(model: PretrainedConfig, number: int) -> TransformerBlock.Config:
    block = Llama3TransformerBlock if model.model_type == "llama" else Qwen3TransformerBlock
    dim = model.hidden_size
    size = head_size(model)
    return block.Config(
        attention_norm=_norm(model, dim),
        ffn_norm=_norm(model, dim),
        attention=make_gqa_config(
            dim=dim,
            n_heads=model.num_attention_heads,
            n_kv_heads=model.num_key_value_heads,
            head_dim=size,
            wqkv_param_init=NO_INIT,
            wo_param_init=NO_INIT,
            inner_attention=PackedAttention.Config(),
            fuse_qkv=True,
            rope=_rope(model),
            qk_norm=None if model.model_type == "llama" else _norm(model, size),
        ),
        **_inner(model, number),
    )


def _inner(model: PretrainedConfig, number: int) -> dict[str, Any]:
    """The MLP of a layer, or its mixture of experts, as transformers' ``Qwen3MoeDecoderLayer`` chooses."""
    sparse = model.model_type == "qwen3_moe" and (
        number not in model.mlp_only_layers and (number + 1) % model.decoder_sparse_step == 0
    )
    dim = model.hidden_size
    if not sparse:
        size = model.intermediate_size
        return {
            "feed_forward": make_ffn_config(
                dim=dim, hidden_dim=size, w1_param_init=NO_INIT, w2w3_param_init=NO_INIT
            )
        }
    count, chosen = model.num_experts, model.num_experts_per_tok
    routed = RoutedExperts.Config(
        inner_experts=Experts.Config(dim=dim, hidden_dim=model.moe_intermediate_size, num_experts=count),
        token_dispatcher=make_token_dispatcher_config(
            num_experts=count, top_k=chosen, comm_backend="standard"
        ),
    )
    router = make_router_config(
        dim=dim,
        num_experts=count,
        gate_param_init=NO_INIT,
        top_k=chosen,
        score_func="softmax",
        route_norm=model.norm_topk_prob,
    )
    moe = make_moe_config(num_experts=count, router=router, routed_experts=routed, load_balance_coeff=None)
    return {"moe": moe}


def _rope(model: PretrainedConfig) -> RoPE.Config:
    """Rotary embeddings of torchtitan's module for the family: its adapters order rows for that one."""
    rope = model.rope_parameters
    common = {
        "dim": head_size(model),
        "max_seq_len": model.max_position_embeddings,
        "theta": rope["rope_theta"],
    }
    if model.model_type != "llama":
        return CosSinRoPE.Config(**common)
    if rope["rope_type"] == "default":
        return ComplexRoPE.Config(**common)
    return ComplexRoPE.Config(
        **common,
        scaling="llama",
        scaling_factor=rope["factor"],
        low_freq_factor=rope["low_freq_factor"],
        high_freq_factor=rope["high_freq_factor"],
        original_max_position_embeddings=rope["original_max_position_embeddings"],
    )
