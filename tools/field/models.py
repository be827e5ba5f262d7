"""Tiny models that the measurements run on, with weights that are large enough for errors to show."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from core_rl_conformance.inputs.tiny_vision import TinyImages, placeholders, vision_config

VOCABULARY = 96
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1024,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
HYBRID = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "qwen3": {"num_hidden_layers": 2},
    "qwen3_next": HYBRID | EXPERTS,
    "qwen3_5_text": HYBRID,
}
HEAD_SCALE = 3.0
"""Of the language-model head: errors of hidden states show in log-probs."""


def write_model(model_type: str, directory: Path) -> str:
    """A float32 model of ``model_type`` in Hugging Face format."""
    config = AutoConfig.for_model(model_type, **COMMON, **MODELS[model_type])
    return _written(partial(AutoModelForCausalLM.from_config, config), directory)


def write_vision_model(family: str, directory: Path) -> str:
    """A float32 vision-language model of the suite's tiny ``family`` in Hugging Face format."""
    config = vision_config(family)
    return _written(partial(AutoModelForImageTextToText.from_config, config), directory)


def _written(build: Callable[..., PreTrainedModel], directory: Path) -> str:
    """The same drawn weights each time, written to ``directory``."""
    with torch.random.fork_rng():
        torch.manual_seed(0)  # parameters of transformers' own rules: decays of Gated DeltaNet
        model = build(dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise / math.sqrt(parameter.shape[-1]))
            else:
                parameter.add_(0.2 * noise)
        model.get_output_embeddings().weight.mul_(HEAD_SCALE)
    model.save_pretrained(directory)
    return str(directory)


def tokens(length: int, seed: int) -> Tensor:
    """Token ids ``[length]`` without special tokens."""
    return torch.randint(2, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Pictured:
    """A sequence with an image."""

    ids: Tensor
    """Token ids ``[L]`` with placeholders."""
    media: Mapping[str, Tensor]
    """Arguments of the model: ``pixel_values [patches, size]`` and ``image_grid_thw [1, 3]``."""


def pictured(family: str, length: int, size: tuple[int, int], seed: int) -> Pictured:
    """A sequence of ``length`` tokens of ``family``, with an image of ``size`` in patches after the first three."""
    image = torch.tensor(placeholders(family, size))
    text = tokens(length - len(image), seed)
    return Pictured(torch.cat([text[:3], image, text[3:]]), TinyImages(family, seed, (size,)).media())
