"""A rank's experts in Megatron as two grouped matrix products.

Megatron's own need the package ``grouped_gemm``, which takes bfloat16 on CUDA alone and keeps weights transposed, or
TransformerEngine. These take torch's `grouped_mm`, on the CPU as well, and rows that are those of the checkpoint.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

__all__ = ["GroupedExperts"]


class GroupedExperts(nn.Module):
    """``num_local_experts`` gated MLPs of SiLU; expert tensor parallelism is 1."""

    def __init__(self, num_local_experts: int, config: TransformerConfig, pg_collection: Any = None) -> None:
        super().__init__()
        inner = config.moe_ffn_hidden_size
        assert inner is not None  # `transformer_config` sets it
        self.linear_fc1 = GroupedLinear(num_local_experts, config.hidden_size, 2 * inner, config)
        self.linear_fc2 = GroupedLinear(num_local_experts, inner, config.hidden_size, config)
        self._fused = bool(config.bias_activation_fusion)

    def forward(self, tokens: Tensor, tokens_per_expert: Tensor, gates: Tensor) -> tuple[Tensor, None]:
        """``[L, H]`` of tokens ``[L, H]``, expert after expert, of which each has ``tokens_per_expert [E]``.

        ``gates [L]`` multiply what each token gets.
        """
        ends = tokens_per_expert.cumsum(0).to(tokens.device, torch.int32, non_blocking=True)
        inner, weights = self.linear_fc1(tokens, ends), gates.unsqueeze(-1)
        if self._fused:
            inner = weighted_bias_swiglu_impl(inner, None, weights)
        else:
            gate, up = inner.chunk(2, dim=-1)
            inner = (F.silu(gate) * up * weights).to(inner.dtype)
        return self.linear_fc2(inner, ends), None


class GroupedLinear(nn.Module):
    """One linear map for each expert: its weight ``[out, in]`` after that of the expert before, ``[E * out, in]``."""

    def __init__(self, experts: int, inputs: int, outputs: int, config: TransformerConfig) -> None:
        super().__init__()
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        rows = torch.empty(experts * outputs, inputs, dtype=config.params_dtype, device=device)
        self.weight = nn.Parameter(rows)
        self._experts = experts

    def forward(self, tokens: Tensor, ends: Tensor) -> Tensor:
        """``[L, out]`` of ``tokens [L, in]``; those of expert ``i`` end before ``ends[i]``, int32."""
        weights = self.weight.unflatten(0, (self._experts, -1)).transpose(1, 2)
        return F.grouped_mm(tokens, weights, offs=ends)
