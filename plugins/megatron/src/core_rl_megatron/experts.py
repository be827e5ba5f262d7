"""Mixtures of experts in Megatron: a router that records and replays its choices, and experts as grouped products."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from torch import Tensor, nn

from core_rl.data.batch import SequenceBatch
from core_rl.data.outputs import OutputName
from core_rl.distributed.collectives import gather
from core_rl.toolkit.parallel_context import ModelShards, TokenSlice
from core_rl.toolkit.routers import Routing, routing_outputs


class PackedRouter(TopKRouter):  # type: ignore[misc]
    """Softmax over all experts, then the likeliest ``k``, their gates normalised if so configured.

    Megatron's own `routing` compiles a helper at its first call (router.py: ``_apply_expert_bias``), and
    balances tokens over whatever is in a micro-batch.
    """

    recorded: Routing | None = None
    """Logits and choices for the last tokens."""
    replay: Tensor | None = None
    """Experts to choose, integers ``[L, k]``, one row for each token that it sees."""

    def gating(self, input: Tensor) -> Tensor:  # noqa: A002  Megatron's name
        """Logits, float32, of states ``[L, 1, H]``. Megatron's own needs TransformerEngine (moe_utils.py:
        ``router_gating_linear`` of 0.16.1 uses a name without its import).
        """
        return F.linear(input.float(), self.weight.float())

    def routing(self, logits: Tensor, padding_mask: None = None) -> tuple[Tensor, Tensor]:
        """Gates ``[L, E]``, 0 for other experts, and choices, bool ``[L, E]``."""
        logits = logits.view(-1, self.config.num_moe_experts)
        probabilities = F.softmax(logits, dim=-1, dtype=torch.float32)
        experts = probabilities.topk(self.topk, dim=-1).indices if self.replay is None else self.replay.long()
        gates = probabilities.gather(1, experts)
        if not self.config.moe_router_pre_softmax:
            gates = gates / gates.sum(-1, keepdim=True)
        self.recorded = Routing(logits, experts)
        routed = torch.zeros_like(probabilities, dtype=torch.bool).scatter(1, experts, True)
        return torch.zeros_like(probabilities).scatter(1, experts, gates), routed


def routers_of(chunk: nn.Module) -> list[PackedRouter]:
    """The routers of a part of the model, in the order of its layers."""
    return [module for module in chunk.modules() if isinstance(module, PackedRouter)]


def mark_experts(parameters: Iterator[tuple[str, nn.Parameter]], spread: bool) -> None:
    """Let the gradients of experts be added over all ranks that have copies of them.

    Megatron marks them only with expert parallelism (layers.py: ``allreduce``); with tensor parallelism
    alone, and experts whole on each rank, tensor parallel ranks see different tokens.
    """
    for name, parameter in parameters:
        if ".experts." in name:
            marks: Any = parameter
            marks.allreduce = not spread


def whole_outputs(
    routings: Sequence[Routing],
    shards: ModelShards,
    tokens: TokenSlice,
    batch: SequenceBatch,
    names: Sequence[OutputName],
    model: str,
) -> dict[str, Tensor]:
    """Router outputs ``names`` for, of all tokens of ``batch``, on every rank that sees some of them."""

    def whole(value: Tensor) -> Tensor:
        if shards.sequence_parallel:
            value = gather(value, shards.tensor, 0, partial=False)
        return tokens.in_batch(gather(value, shards.context, 0, partial=False), batch.num_tokens)

    everything = [Routing(whole(routing.logits), whole(routing.experts)) for routing in routings]
    return routing_outputs(everything, batch.cu_seqlens, names, model)


class TokenLinear(nn.Module):
    """A linear map without bias, whole on each rank, of the tokens that the rank has."""

    def __init__(self, inputs: int, outputs: int, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype))
        self.sequence_parallel = bool(config.sequence_parallel)
        cast("Any", self.weight).sequence_parallel = self.sequence_parallel

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        """``[L, 1, out]`` of ``hidden [L, 1, in]``, and no bias, as Megatron's linear layers."""
        return F.linear(hidden, self.weight), None


class SharedExpert(SharedExpertMLP):  # type: ignore[misc]
    """Its gate is a layer, which can have an adapter. Megatron's is a parameter."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        gate: bool,
        pg_collection: Any = None,
        name: str | None = None,
    ) -> None:
        super().__init__(config, submodules, gate=False, pg_collection=pg_collection)
        self.gate = TokenLinear(config.hidden_size, 1, config) if gate else None

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = super().forward(hidden)
        return output if self.gate is None else output * self.gate(hidden)[0].sigmoid()


class GroupedExperts(nn.Module):
    """``num_local_experts`` gated MLPs of SiLU; expert tensor parallelism is 1."""

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        pg_collection: Any = None,
        name: str | None = None,
    ) -> None:
        super().__init__()
        inner = config.moe_ffn_hidden_size
        assert inner is not None  # `transformer_config` sets it
        self.linear_fc1 = GroupedLinear(num_local_experts, config.hidden_size, 2 * inner, config)
        self.linear_fc2 = GroupedLinear(num_local_experts, inner, config.hidden_size, config)
        self._fused = bool(config.bias_activation_fusion)

    def forward(self, tokens: Tensor, tokens_per_expert: Tensor, gates: Tensor) -> tuple[Tensor, None]:
        """``[L, H]`` of tokens ``[L, H]``, expert after expert, of which each has ``tokens_per_expert [E]``.

        ``gates [L]`` multiply each token's output.
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
        """``[L, out]`` of ``tokens [L, in]``; tokens of expert ``i`` end before ``ends[i]``, int32."""
        weights = self.weight.unflatten(0, (self._experts, -1)).transpose(1, 2)
        return F.grouped_mm(tokens, weights, offs=ends)
