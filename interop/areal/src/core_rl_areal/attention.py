"""Attention over packed rows on a CPU: transformers' ``sdpa``, called for each sequence alone."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

PACKED = "core_rl_packed"
"""Its name in transformers' `AttentionInterface`."""


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    cu_seq_lens_q: Tensor,
    **_: object,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence of one packed row.

    ``query`` is ``[1, heads, tokens, size]``, the result ``[1, tokens, heads, size]``. AReaL passes the boundaries of
    sequences (``cu_seq_lens_q [sequences + 1]``) to the kernels that it expects, and no mask.
    """
    if attention_mask is not None:
        raise ValueError("a packed row came with an attention mask; only rows without one can be cut")
    parts = []
    for start, end in pairwise(cu_seq_lens_q.tolist()):
        row = slice(start, end)
        part, _weights = sdpa_attention_forward(
            module, query[:, :, row], key[:, :, row], value[:, :, row], None, dropout, scaling
        )
        parts.append(part)
    return torch.cat(parts, dim=1), None


AttentionInterface.register(PACKED, packed_attention)
