"""Tiny vision-language models, by the names of their families in the suite, and images for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

from core_rl_conformance.profile import VISION

VOCABULARY = 199
"""Ids of text; the ids after them are of images."""
START, END, IMAGE, VIDEO = range(VOCABULARY, VOCABULARY + 4)
ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2]}
TOKENS: dict[str, Any] = {"pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}
SHARED: dict[str, Any] = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    **TOKENS,
}
"""Fields of most families, of text alone too: grouped-query attention, and no id for padding."""
PLAIN: dict[str, Any] = {**SHARED, "hidden_size": 40, "intermediate_size": 66, "tie_word_embeddings": False}
"""Untied embeddings."""
DELTA_NET: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
    "linear_conv_kernel_dim": 4,
}
"""Heads of Gated DeltaNet with two values for a key."""
MIXTURE: dict[str, Any] = {
    "num_hidden_layers": 3,
    "moe_intermediate_size": 24,
    "mlp_only_layers": [0],
    "num_experts": 5,
    "num_experts_per_tok": 2,
}
"""A dense layer and two of five experts, of which each token takes two; no number of ranks divides them."""
TEXT: dict[str, Any] = {**PLAIN, "vocab_size": VOCABULARY + 12, "num_hidden_layers": 3, "head_dim": 12}
IDS: dict[str, Any] = {**TOKENS, "image_token_id": IMAGE, "tie_word_embeddings": False}
GRID_IDS = {**IDS, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}
GRID: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 40,
}
PATCH_SIZE = 3 * 2 * 4 * 4
"""Numbers in a patch: channels, frames, height and width."""
WHOLE: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_channels": 3,
}
WHOLE_TOKENS = 4
QWEN3: dict[str, Any] = {
    "text_config": {**TEXT, "rope_parameters": {**ROPE, "mrope_interleaved": True}},
    "vision_config": {**GRID, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    **GRID_IDS,
}
CONFIGS: dict[str, dict[str, Any]] = {
    # Features of a layer of the tower are added after the first layers of the text.
    "qwen3_vl": QWEN3,
    # Windows in the tower, and biases in the text.
    "qwen2_5_vl": {
        "text_config": {
            **{name: value for name, value in TEXT.items() if name != "head_dim"},
            "hidden_size": 48,
            "rope_parameters": ROPE,
        },
        "vision_config": {**GRID, "out_hidden_size": 48, "window_size": 16, "fullatt_block_indexes": [1]},
        **GRID_IDS,
    },
    # Gated DeltaNet in the text.
    "qwen3_5_vl": {
        "text_config": {
            **TEXT,
            **DELTA_NET,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "rope_parameters": {
                **ROPE,
                "mrope_section": [1, 1, 1],
                "mrope_interleaved": True,
                "partial_rotary_factor": 0.5,
            },
        },
        "vision_config": {**GRID, "num_position_embeddings": 16},
        **GRID_IDS,
    },
    # The tokens of an image see each other in both directions; sliding windows.
    "gemma3_vl": {
        "text_config": {
            **TEXT,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        "vision_config": {**WHOLE, "image_size": 16, "patch_size": 4},
        "mm_tokens_per_image": WHOLE_TOKENS,
        "boi_token_index": START,
        "eoi_token_index": END,
        **IDS,
    },
    "internvl": {
        "text_config": {**TEXT, "model_type": "qwen3"},
        "vision_config": {**WHOLE, "image_size": [16, 16], "patch_size": [4, 4]},
        "image_seq_length": WHOLE_TOKENS,
        **IDS,
    },
    # The same as Qwen3-VL with a dense layer and two of experts.
    "qwen3_vl_moe": QWEN3 | {"text_config": {**QWEN3["text_config"], **MIXTURE}},
}
MODEL_TYPES = {"qwen3_5_vl": "qwen3_5", "gemma3_vl": "gemma3"}
"""Names of transformers', where they are not the suite's."""
assert tuple(CONFIGS) == VISION


def vision_config(family: str) -> PretrainedConfig:
    """The transformers config of ``family``."""
    config: PretrainedConfig = AutoConfig.for_model(MODEL_TYPES.get(family, family), **CONFIGS[family])
    return config


def spread_positions(text: PretrainedConfig, head_size: int | None) -> None:
    """Let positions in time, height and width turn all pairs of a head of this size; None leaves the family's own."""
    rope = getattr(text, "rope_parameters", None) or {}
    if "mrope_section" in rope and head_size is not None:
        third = head_size // 6
        text.rope_parameters = {**rope, "mrope_section": [head_size // 2 - 2 * third, third, third]}


@dataclass(frozen=True)
class TinyImages:
    """Images of one sequence; equal fields give equal pixels."""

    family: str
    seed: int
    sizes: tuple[tuple[int, int], ...]
    """Height and width of each in patches, even; families with images of one size have that one."""

    def media(self) -> Mapping[str, Tensor]:
        """Arguments of the model, the same object for equal images."""
        return _drawn(self)


@lru_cache(maxsize=1024)
def _drawn(images: TinyImages) -> Mapping[str, Tensor]:
    generator = torch.Generator().manual_seed(images.seed)
    config = CONFIGS[images.family]
    if "spatial_merge_size" in config["vision_config"]:
        patches = sum(height * width for height, width in images.sizes)
        return {
            "pixel_values": torch.randn(patches, PATCH_SIZE, generator=generator),
            "image_grid_thw": torch.tensor([[1, height, width] for height, width in images.sizes]),
        }
    return {"pixel_values": torch.randn(len(images.sizes), 3, 16, 16, generator=generator)}


def placeholders(family: str, size: tuple[int, int]) -> tuple[int, ...]:
    """Ids of an image of ``size``: its begin, a placeholder for each feature, and its end."""
    merge = CONFIGS[family]["vision_config"].get("spatial_merge_size")
    count = WHOLE_TOKENS if merge is None else size[0] * size[1] // merge**2
    return (START, *(IMAGE,) * count, END)
