"""Tiny configs of the causal language models in transformers: each family's own defaults, with small sizes."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from core_rl.config.engine import Head, ModelConfig
from core_rl.data.batch import SequenceBatch
from core_rl.toolkit.attention import PACKED_ATTENTION, register_packed_attention
from core_rl.toolkit.build import build_model
from core_rl.toolkit.packed import PackedModel

FAMILIES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
"""The model types that `AutoModelForCausalLM` builds."""
BY_SIZE: dict[int, str] = {
    97: "vocab_size vocab_size_per_layer_input unpadded_vocab_size",
    64: "max_position_embeddings n_positions n_ctx max_seq_len max_sequence_length max_target_positions "
    "index_topk max_source_positions original_max_position_embeddings rel_extent mamba_d_ssm",
    50: "ngram_vocab_size_base encoder_hash_byte_group_vocab",
    48: "intermediate_size ffn_dim n_inner d_ff ffn_hidden_size decoder_ffn_dim encoder_ffn_dim "
    "intermediate_size_mlp dense_intermediate_size dim_ff dff d_inner feed_forward_size",
    32: "hidden_size d_model n_embd embed_dim word_embed_proj_dim embedding_size emb_dim embedding_dim lru_width "
    "attention_hidden_size output_embedding_size input_embedding_size dim_model",
    24: "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size expert_intermediate_size "
    "shared_experts_intermediate_size expert_ffn_hidden_size moe_shared_expert_intermediate_size",
    16: "mamba_d_head mamba_head_dim mamba_headdim ple_embed_dim dim_model_base router_hidden_size image_size",
    12: "q_lora_rank kv_lora_rank qk_head_dim o_lora_rank",
    8: "head_dim attention_head_dim kv_channels dim_head d_head swa_head_dim linear_head_dim v_head_dim d_kv "
    "block_size qk_nope_head_dim index_head_dim linear_key_head_dim linear_value_head_dim mamba_d_state "
    "ssm_state_size state_size query_pre_attn_scalar laurel_rank hc_lowrank hidden_size_per_layer_input "
    "block_multiple_of index_block_size ffn_round_up_to_multiple_of attention_head_size chunk_size "
    "mamba_chunk_size",
    5: "sliding_window window_size sliding_window_size attention_window_size attention_chunk_size "
    "local_attention keep_window_size",
    4: "num_hidden_layers n_layer n_layers num_layers num_attention_heads n_head n_heads num_heads "
    "encoder_layers decoder_layers decoder_attention_heads encoder_attention_heads swa_num_attention_heads "
    "linear_num_heads rotary_dim qk_rope_head_dim num_experts num_local_experts n_routed_experts "
    "moe_num_experts mamba_n_heads mamba_num_heads max_window_layers patch_size linear_num_value_heads "
    "linear_conv_kernel_dim mamba_dt_rank time_step_rank adapter_rank",
    3: "moe_layer_end_index",
    2: "num_key_value_heads num_kv_heads swa_num_key_value_heads num_experts_per_tok moe_top_k moe_k moe_topk "
    "depth top_k_experts num_experts_per_token index_n_heads linear_num_key_heads mamba_expand n_mamba_heads "
    "zero_expert_num num_blocks split_ngram_parts make_ngram_vocab_size_divisible_by hc_sinkhorn_iters",
    1: "n_shared_experts n_group topk_group first_k_dense_replace mamba_n_groups n_groups num_dense_layers "
    "bos_token_id",
    0: "num_kv_shared_layers",
}
SIZES = {name: size for size, names in BY_SIZE.items() for name in names.split()}
"""Fields that are set where a family's default is a number."""
MLA = {"head_dim": 4, "num_key_value_heads": 4, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
PADDED = {"pad_token_id": 1, "is_decoder": True}
ZAMBA = {
    "layers_block_type": ["linear_attention", "hybrid"] * 2,
    "num_key_value_heads": 4,
    "attention_hidden_size": 64,
    "attention_head_dim": 16,
}
HEADS = {"head_dim": 8}
DECODER = {"is_decoder": True}
OVERRIDES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "axk2", "deepseek_v3", "youtu", "longcat_flash"), MLA),
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "minicpm3", "kimi_linear"), MLA
    ),
    **dict.fromkeys(
        (
            "camembert",
            "data2vec-text",
            "roberta",
            "roberta-prelayernorm",
            "xlm-roberta",
            "xlm-roberta-xl",
            "xmod",
        ),
        PADDED,
    ),
    **dict.fromkeys(
        ("bert", "bert-generation", "electra", "ernie", "megatron-bert", "rembert", "roformer"), DECODER
    ),
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral"), HEADS),
    "bailing_hybrid": MLA | {"head_dim": 8, "num_expert_groups": 1, "n_group": 1, "topk_group": 1},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "deepseek_v2": MLA | {"num_experts_per_tok": 2},
    "gemma4_text": {"pad_token_id": 0},
    "gemma4_unified_text": {"pad_token_id": 0},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dots3_note_text": {"num_key_value_heads": 4},
    "emu3_text_model": {"pad_token_id": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "conv"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "conv"]},
    "mamba2": {"num_heads": 4, "head_dim": 16},
    "modernbert-decoder": {"pad_token_id": 0},
    "mpt": {"attn_config": {}},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 1,
    },
    "reformer": {"is_decoder": True, "axial_pos_shape": [8, 8], "axial_pos_embds_dim": [16, 16]},
    "roc_bert": {"pronunciation_vocab_size": 20, "shape_vocab_size": 20, **DECODER},
    "zamba": ZAMBA,
    "zamba2": ZAMBA | {"n_mamba_heads": 4},
    "zaya": {"num_experts_per_tok": 1},
}
"""Exceptions to the sizes above, by model type."""


def tiny_config(family: str) -> PretrainedConfig:
    """A config of the model type ``family`` with its own defaults and small sizes; what raises cannot be built."""
    kind = CONFIG_MAPPING[family]
    defaults: PretrainedConfig = kind()
    values: dict[str, Any] = _small(defaults)
    for name in getattr(kind, "sub_configs", None) or {}:
        part = getattr(defaults, name, None)
        if isinstance(part, PretrainedConfig):
            values[name] = _small(part) | OVERRIDES.get(part.model_type, {})
    return kind(**(values | OVERRIDES.get(family, {})))


def _small(defaults: PretrainedConfig) -> dict[str, Any]:
    local: Mapping[str, Any] = defaults.to_dict()
    numbers = {name: size for name, size in SIZES.items() if type(local.get(name)) in (int, float)}
    return {**numbers, **({"pad_token_id": None} if "pad_token_id" in local else {}), "eos_token_id": 2}


ROTARY_SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "attention_factor": 1.3},
    "longrope": {"factor": 4.0, "short_mscale": 1.0, "long_mscale": 1.2},
    "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "proportional": {"factor": 4.0},
}
"""Parameters of each kind of rotary scaling in transformers."""


def has_rotary_scaling(family: str) -> bool:
    """Whether the config of ``family`` has parameters of rotary embeddings."""
    try:
        return bool(getattr(tiny_config(family), "rope_parameters", None))
    except Exception:  # noqa: BLE001  (of many types; `tiny_config` is judged elsewhere)
        return False


def with_rotary_scaling(family: str, kind: str, length: int = 16) -> PretrainedConfig:
    """`tiny_config` with rotary scaling beyond ``length`` positions, in each layer type."""
    config = tiny_config(family)
    parameters = config.rope_parameters
    config.max_position_embeddings = length if kind == "dynamic" else 4 * length
    if hasattr(config, "original_max_position_embeddings"):
        config.original_max_position_embeddings = length
    nested = [part for part in parameters.values() if isinstance(part, dict)]
    for part in nested or [parameters]:
        part.update(ROTARY_SCALINGS[kind], rope_type=kind)
        if kind in ("yarn", "longrope", "llama3"):
            part["original_max_position_embeddings"] = length
        if kind == "longrope":
            size = int(_rotary_size(config) * part.get("partial_rotary_factor", 1.0)) // 2
            part.update(short_factor=[1.0] * size, long_factor=[4.0 + 2 * number for number in range(size)])
    return config


def _rotary_size(config: PretrainedConfig) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def tiny_model(
    family: str, attn_implementation: str = "eager", config: PretrainedConfig | None = None
) -> PreTrainedModel:
    """The float32 model of ``config``, by default of `tiny_config`, in evaluation mode.

    Its weights are large enough that errors show.
    """
    torch.manual_seed(0)
    config = copy.deepcopy(config) or tiny_config(family)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        config, attn_implementation=attn_implementation, dtype=torch.float32
    )
    generator = torch.Generator().manual_seed(0)
    head = model.get_output_embeddings()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise / math.sqrt(parameter.shape[-1]))
            else:
                parameter.add_(0.2 * noise)
        if head is not None:
            head.weight.mul_(3.0)
    model.eval()
    return model


def token_logprobs(model: PreTrainedModel, sequences: Sequence[Tensor]) -> list[Tensor]:
    """The plain model's log-probs of all tokens of each sequence but the first, one sequence at a time."""
    actual = []
    for ids in sequences:
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
        actual.append(F.log_softmax(logits, dim=-1).gather(1, ids[1:, None])[:, 0])
    return actual


def packed_logprobs(packed: PackedModel, sequences: Sequence[Tensor]) -> list[Tensor]:
    """The same of one packed batch."""
    actual = packed(SequenceBatch.from_sequences(sequences), ("logprobs",))["logprobs"]
    return [part[1:] for part in actual.split([len(ids) for ids in sequences])]


def packed_model(
    family: str, directory: Path, head: Head = "lm", config: PretrainedConfig | None = None
) -> PackedModel:
    """`tiny_model` as engines of the toolkit pack it, read from ``directory``, where it is written."""
    tiny_model(family, config=config).save_pretrained(directory)
    register_packed_attention()
    selected = ModelConfig(path=str(directory), head=head)
    return PackedModel(build_model(selected, seed=0, attn_implementation=PACKED_ATTENTION), head)
