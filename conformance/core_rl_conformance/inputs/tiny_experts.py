"""Routers of a tiny mixture of experts whose choices no rounding changes.

A random router has tokens between two experts, and a single flip in bfloat16 is a large error without
a bug. So each token id is marked with the experts that it takes: in the first entries of its
embedding, one for each expert, positive for those and negative for the others, which the routers read
and nothing else writes much into. The layer's norm and the other entries moves gates and not signs.

No token chooses the last of five experts, and few choose the fourth. So gradients of zero and ranks without
tokens for an expert are always there.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

MARK = 1.5
"""Size of a mark; the other entries of an embedding have a standard deviation of 0.16."""
GAIN = 1.0
"""Factor of a router on a mark."""
QUIET = 0.05
"""Remaining share of other parameters on the marked entries."""
KINDS = 3
"""Pairs of experts that most token ids take, in turn."""
IMAGES = (1, 2)
"""Experts that the features of all images take."""
RARE = 7
"""Every so many-th token id takes the rare expert."""


def draw_router(name: str, noise: Tensor) -> Tensor:
    """A router ``[experts, hidden]``; experts change places from layer to layer."""
    experts, hidden = noise.shape
    layer = int(name.partition(".layers.")[2].partition(".")[0])
    weight: Tensor = 0.25 * noise / hidden**0.5
    weight[:, :experts] = GAIN * torch.eye(experts).roll(layer, dims=0)
    return weight


def mark_tokens(model: PreTrainedModel) -> None:
    """Mark the token ids of ``model``, which is left alone if it has no experts; run without gradients."""
    experts = getattr(model.config.get_text_config(), "num_experts", None)
    if not experts:
        return
    embedding = model.get_input_embeddings().weight
    assert isinstance(embedding, Tensor)
    for token, row in enumerate(embedding):
        # Two of the first three; or the first of them and the rare fourth; the last is never chosen.
        left = token % KINDS
        experts_of_token = (left, experts - 2) if token % RARE == 0 else (left, (left + 1) % KINDS)
        sizes = row[:experts].abs().clamp(max=0.3)
        row[:experts] = -MARK - sizes
        for expert in experts_of_token:
            row[expert] = MARK + sizes[expert]
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "out_proj.weight")) or (
            name.endswith("down_proj.weight") and parameter.dim() == 2
        ):
            parameter[:experts] *= QUIET
        elif name.endswith("experts.down_proj"):
            parameter[:, :experts] *= QUIET
        elif ".visual." in name and "merger" in name and "linear_fc2" in name:
            parameter[:experts] *= QUIET
            if name.endswith("visual.merger.linear_fc2.bias"):
                parameter[:experts] += torch.tensor([MARK if e in IMAGES else -MARK for e in range(experts)])


def alike(token: int) -> int:
    """A token id near ``token`` that takes the experts 1 and 2, as all of these do."""
    period = KINDS * RARE
    return token // period * period + 1
