"""Rotary embeddings: their frequencies, the positions that turn these, and the turning."""

from __future__ import annotations

from typing import Any, cast

import torch
from megatron.core.jit import jit_fuser
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from core_rl.errors import UnsupportedCapability

FIXED_ROPE = ("default", "linear", "llama3")
"""Kinds of rotary frequencies that neither depend on the length of the sequence nor scale the scores."""
INTERLEAVED = frozenset({"qwen3_vl_text"})
"""Text models in which frequencies for time, height and width take turns; in others they follow each other."""


def rotated(value: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``value [L, 1, heads, D]`` with its first numbers, as many as angles, turned by the angles of its tokens,
    as in rope_utils.py. There, each layer computes cosines and sines again.
    """
    turned, rest = value[..., : cos.shape[-1]], value[..., cos.shape[-1] :]
    left, right = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat([-right, left], dim=-1) * sin
    return torch.cat([turned, rest], dim=-1) if rest.shape[-1] else turned


compiled_rotated = jit_fuser(rotated)


def rotary_frequencies(model: PreTrainedModel) -> Tensor:
    """The rotary frequencies of ``model``, float32 ``[D / 2]``, with whatever scaling its config asks for."""
    config = model.config.get_text_config()
    kind = config.rope_parameters["rope_type"]
    if kind not in FIXED_ROPE:
        raise UnsupportedCapability(
            f"rope_type={kind!r} is not known to the engine 'megatron', which knows "
            f"{', '.join(map(repr, FIXED_ROPE))}; use the engine 'fsdp'"
        )
    rotary: Any = cast("Any", model.get_decoder()).rotary_emb
    frequencies: Tensor = type(rotary)(config).inv_freq  # of the model they may have no memory
    return frequencies


def frequency_axes(text: PretrainedConfig) -> Tensor:
    """Time (0), height (1) or width (2) for each rotary frequency of the model ``text``: int64 ``[D / 2]``.

    transformers computes them in its rotary embedding or in its attention, which differs by version.
    """
    sections = torch.tensor(text.rope_parameters["mrope_section"])
    if text.model_type in INTERLEAVED:
        axes = torch.zeros(int(sections.sum()), dtype=torch.long)
        for axis in (1, 2):
            axes[axis : 3 * int(sections[axis]) : 3] = axis
        return axes
    return torch.arange(3).repeat_interleave(sections)
