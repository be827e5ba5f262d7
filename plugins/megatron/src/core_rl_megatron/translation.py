"""Translation of a transformers config to Megatron's, or a clear refusal."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from transformers import PretrainedConfig

from core_rl.config.layout import ParallelLayout
from core_rl.distributed.devices import device_type
from core_rl.errors import LayoutError, UnsupportedCapability, raise_all
from core_rl.toolkit.attention import check_heads, head_size
from core_rl.toolkit.vision import has_tower
from core_rl_megatron.config import MegatronConfig
from core_rl_megatron.images import level_count
from core_rl_megatron.options import uses_fusions
from core_rl_megatron.versions import no_cuda_graphs, packs_delta_net

FAMILIES: dict[str, dict[str, bool]] = {
    "llama": {},
    "qwen2": {"add_qkv_bias": True},
    "qwen3": {"qk_layernorm": True},
    "qwen3_moe": {"qk_layernorm": True},
    "qwen3_5_text": {"qk_layernorm": True, "attention_output_gate": True},
    "qwen3_next": {"qk_layernorm": True, "attention_output_gate": True, "moe_shared_expert_gate": True},
    "qwen2_5_vl": {"add_qkv_bias": True},
    "qwen3_vl": {"qk_layernorm": True},
}
"""Fields of Megatron's config by ``model_type``. Others need a table of names in `core_rl_megatron.naming` as well."""
HYBRIDS = frozenset({"qwen3_5_text", "qwen3_next"})
"""Families with Gated DeltaNet in some layers, norms around 1 and a part of each head rotated."""
DELTA_NET = (
    "linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads",
    "linear_num_value_heads",
)  # fmt: skip
"""Sizes of Gated DeltaNet, under the same names in both configs."""
BY_KEY_HEAD = frozenset({"qwen3_next"})
"""Families whose files have the projections of Gated DeltaNet key head by key head."""
GRIDS = frozenset({"qwen2_5_vl_text", "qwen3_vl_text"})
"""Text models whose tokens have positions in time, height and width."""
RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


def family_of(model: PretrainedConfig) -> dict[str, bool]:
    """Fields of the family of ``model``; `UnsupportedCapability` for one without a mapping, or for a variant of one."""
    if model.model_type not in FAMILIES:
        raise UnsupportedCapability(
            f"the engine 'megatron' has no mapping for the model family {model.model_type!r}; "
            f"it knows {', '.join(sorted(FAMILIES))}: use these, or the engine 'fsdp'"
        )
    raise_all(UnsupportedCapability, f"this {model.model_type!r} model", _variants(model.get_text_config()))
    return FAMILIES[model.model_type]


def is_hybrid(model: PretrainedConfig) -> bool:
    """Whether ``model`` is of `HYBRIDS`."""
    return model.model_type in HYBRIDS


def _variants(model: PretrainedConfig) -> Iterator[str]:
    """Settings of a known family that the mapping lacks."""
    if model.hidden_act != "silu":
        yield f"hidden_act={model.hidden_act!r}; the mapping knows 'silu'"
    for name in ("attention_bias", "mlp_bias"):
        if getattr(model, name, False):
            yield f"{name}=True; the mapping has no such bias"
    known = {"full_attention", "linear_attention"} if is_hybrid(model) else {"full_attention"}
    if other := set(getattr(model, "layer_types", None) or ()) - known:
        yield f"{', '.join(sorted(other))} in some layers; the mapping knows {', '.join(sorted(known))}"
    if is_hybrid(model) and not packs_delta_net():
        yield (
            "Gated DeltaNet, which Megatron-Core packs from 0.18 on: take Python 3.12 and "
            "pip install 'megatron-core>=0.18,<0.20'"
        )
    if getattr(model, "shared_expert_intermediate_size", 1) == 0:
        yield "shared_expert_intermediate_size=0; the mapping knows shared experts of one number or more"
    rope = model.rope_parameters
    if model.model_type in GRIDS:
        size = head_size(model)
        section = rope.get("mrope_section") or ()
        if len(section) != 3 or 2 * sum(section) != size:
            yield (
                f"rope_parameters.mrope_section={section}; the mapping takes three numbers that add up to half of "
                f"head_dim={size}"
            )
    if not is_hybrid(model) and rope.get("partial_rotary_factor", 1.0) != 1.0:
        yield f"partial_rotary_factor={rope['partial_rotary_factor']}; the mapping turns all of each head"


def _misfits(model: PretrainedConfig, layout: ParallelLayout, stages: int) -> Iterator[str]:
    """Every number of ``model`` that ``layout`` does not divide; ``stages`` counts virtual ones too."""
    layers = model.num_hidden_layers
    if layers < stages:
        yield f"pp * options.virtual_stages = {stages} stages for num_hidden_layers={layers}; lower pp"
    elif layers % stages:
        yield f"pp * options.virtual_stages = {stages} does not divide num_hidden_layers={layers}; change pp"
    yield from layout.misfits(model)


def _hybrid_misfits(model: PretrainedConfig, layout: ParallelLayout) -> Iterator[str]:
    if layout.cp > 1:
        yield f"cp={layout.cp} of Gated DeltaNet, whose state runs over all tokens; use tp, or dp"
    if layout.tp > 1 and not layout.sequence_parallel:
        yield f"tp={layout.tp} without sequence_parallel, where Megatron does not add up the gradient of a norm; set it"
    for name in ("linear_num_key_heads", "linear_num_value_heads"):
        if getattr(model, name) % layout.tp:
            yield f"tp={layout.tp} does not divide {name}={getattr(model, name)}; change tp"


def _image_misfits(model: PretrainedConfig, layout: ParallelLayout, stages: int) -> Iterator[str]:
    if layout.sequence_parallel:
        yield "sequence_parallel, and features of images go to their places among all tokens; leave it off"
    layers = model.get_text_config().num_hidden_layers // stages
    if layers < level_count(model):
        yield (
            f"pp * options.virtual_stages = {stages} leaves {layers} layers on the first stage, and features of "
            f"images are added to the first {level_count(model)}; lower pp"
        )


def _unsupported(config: MegatronConfig) -> Iterator[str]:
    """Settings that the mapping of hybrids lacks."""
    if config.options.overlap_param_gather:
        # ssm/gated_delta_net: `forward` reads `conv1d.weight` without calling `conv1d`, whose hook would wait.
        yield "options.overlap_param_gather = true, under which Megatron convolves with weights of the step before"
    if config.options.transformer_impl != "local":
        yield f"options.transformer_impl = {config.options.transformer_impl!r}; set it to 'local'"


def check_adapted(weights: Collection[str], model: PretrainedConfig) -> None:
    """Raise `UnsupportedCapability` where ``weights``, which have an adapter, are of a vision tower."""
    inside = [name for name in weights if name.startswith("model.visual.")]
    if inside:
        raise UnsupportedCapability(
            f"model.lora.target_modules reach {inside[0]!r} in the vision tower of {model.model_type!r}, which the "
            "engine 'megatron' has as transformers' own, without adapters; name layers of the text, or 'all-linear', "
            "which are these, or use the engine 'fsdp'"
        )


def check_model_layout(config: MegatronConfig, model: PretrainedConfig) -> None:
    """Raise as `transformer_config` does, for numbers of ``model`` that the layout does not divide."""
    family_of(model)
    layout, text = config.layout, model.get_text_config()
    stages = layout.pp * config.options.virtual_stages
    if is_hybrid(model):
        raise_all(UnsupportedCapability, f"this {model.model_type!r} model", _unsupported(config))
        raise_all(
            LayoutError, f"layout {layout} of this {model.model_type!r} model", _hybrid_misfits(model, layout)
        )
    misfits = [
        *_misfits(text, layout, stages),
        *(_image_misfits(model, layout, stages) if has_tower(model) else ()),
    ]
    raise_all(LayoutError, f"layout {layout} of this {model.model_type!r} model", misfits)
    check_heads(text.num_attention_heads // layout.tp, layout.cp)


def transformer_config(config: MegatronConfig, model: PretrainedConfig) -> TransformerConfig:
    """Megatron's config of ``model`` at the layout of ``config``.

    Raises `UnsupportedCapability` for a family or variant that has no mapping, and `LayoutError` where
    the layout divides something unevenly.
    """
    check_model_layout(config, model)
    family, layout, options = family_of(model), config.layout, config.options
    model = model.get_text_config()
    half = config.dtype == "bfloat16"
    return TransformerConfig(
        num_layers=model.num_hidden_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.intermediate_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_key_value_heads,
        kv_channels=head_size(model),
        attention_dropout=model.attention_dropout,
        hidden_dropout=0.0,
        normalization="RMSNorm",
        layernorm_epsilon=model.rms_norm_eps,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        bf16=half,
        params_dtype=torch.float32,  # weights are set in float32 and cast after that
        pipeline_dtype=torch.bfloat16 if half else torch.float32,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=options.virtual_stages if options.virtual_stages > 1 else None,
        context_parallel_size=layout.cp,
        sequence_parallel=layout.sequence_parallel,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=1,
        # Micro-batches are packed, each of its own length; the dispatcher is asked for in dense models as well.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # noqa: S106  no password
        # On gloo, batched sends to both neighbours at once mix up where the two are one rank; NCCL needs them.
        batch_p2p_comm=device_type(config.device) == "cuda",
        # The core has divided the loss by its whole weight: see `core_rl_megatron.schedule`.
        calculate_per_token_loss=True,
        # Weights are loaded, not drawn.
        perform_initialization=False,
        use_cpu_initialization=not torch.cuda.is_available(),
        gradient_accumulation_fusion=False,
        bias_activation_fusion=uses_fusions(config),
        transformer_impl=options.transformer_impl,
        **no_cuda_graphs(),
        **family,
        **({name: getattr(model, name) for name in DELTA_NET} if is_hybrid(model) else {}),
        **RECOMPUTE[options.recompute],
        **(_experts(model) if getattr(model, "num_experts", None) else {}),
    )


def _experts(model: PretrainedConfig) -> dict[str, Any]:
    """Softmax over all experts, then the likeliest ``k``, normalised if so configured; a shared expert or none."""
    sparse = [
        int(layer not in model.mlp_only_layers and (layer + 1) % model.decoder_sparse_step == 0)
        for layer in range(model.num_hidden_layers)
    ]
    return {
        "num_moe_experts": model.num_experts,
        "moe_ffn_hidden_size": model.moe_intermediate_size,
        "moe_router_topk": model.num_experts_per_tok,
        "moe_layer_freq": sparse,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_pre_softmax": not model.norm_topk_prob,
        "moe_shared_expert_intermediate_size": getattr(model, "shared_expert_intermediate_size", None),
    }
