"""Megatron's GPT model over packed batches: its own layers, with the parts below in place of a few of them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from core_rl.config.engine import Head
from core_rl.data.batch import SequenceBatch
from core_rl.distributed.comm import Comm
from core_rl.toolkit.attention import packed_attention
from core_rl.toolkit.parallel_context import TokenSlice
from core_rl.toolkit.segments import Segments
from core_rl.toolkit.vision import has_tower
from core_rl_megatron.experts import GroupedExperts, PackedRouter, SharedExpert
from core_rl_megatron.images import StageImages, level_adder, level_count
from core_rl_megatron.rotary import compiled_rotated, rotary_frequencies, rotated
from core_rl_megatron.translation import BY_KEY_HEAD, is_hybrid
from core_rl_megatron.versions import submodules_of


@dataclass
class _PackedParams(PackedSeqParams):  # type: ignore[misc]
    """Carries the sequences to the attention. Megatron sees no ``thd`` format: rotary embeddings are already those
    of each token, and the attention here knows the boundaries.
    """

    segments: Segments | None = None
    cos: Tensor | None = None
    """Cosines of the rotary angles of each token, ``[L, 1, 1, D]``, in the compute dtype."""
    sin: Tensor | None = None
    places: Tensor | None = None
    """Places of features of images among the tokens."""


class RMSNorm(nn.Module):
    """Norm of transformers, or torch's fused kernel. Megatron's local norm refuses sequence parallelism
    (torch_norm.py), where the gradient of each rank is of its own tokens: the mark lets Megatron add them up.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.eps = eps
        self._fused = bool(config.bias_activation_fusion)
        cast("Any", self.weight).sequence_parallel = config.sequence_parallel

    def forward(self, hidden: Tensor) -> Tensor:
        if self._fused:
            return nn.functional.rms_norm(hidden, self.weight.shape, self.weight, self.eps)
        upcast = hidden.float()
        upcast = upcast * torch.rsqrt(upcast.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * upcast.to(hidden.dtype)


class ZeroCenteredRMSNorm(RMSNorm):
    """Its weights are differences from 1; the product is computed in float32, as in transformers."""

    def forward(self, hidden: Tensor) -> Tensor:
        upcast = hidden.float()
        upcast = upcast * torch.rsqrt(upcast.square().mean(-1, keepdim=True) + self.eps)
        return (upcast * (1.0 + self.weight.float())).to(hidden.dtype)


class PackedCoreAttention(nn.Module):
    """Rotary embeddings, and the core's attention inside each packed sequence; over context parallel ranks it swaps
    tokens for heads.

    Megatron's local one takes neither packed sequences nor context parallelism, and that of TransformerEngine another
    format of them.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        cp_comm_type: str | None = None,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__()
        self._dropout = float(config.attention_dropout)
        self._scale = softmax_scale
        self._spread_tokens = bool(config.sequence_parallel)
        self._fused = bool(config.bias_activation_fusion)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None,
        *,
        packed_seq_params: _PackedParams,
        attn_mask_type: Any = None,
        attention_bias: None = None,
    ) -> Tensor:
        """``[T, 1, heads, D]`` to ``[T, 1, heads * D]``."""
        segments, cos, sin = packed_seq_params.segments, packed_seq_params.cos, packed_seq_params.sin
        assert segments is not None  # `PackedGPT` passes all three
        assert cos is not None
        assert sin is not None
        turn = compiled_rotated if self._fused and query.is_cuda else rotated
        query, key = turn(query, cos, sin), turn(key, cos, sin)
        dropout = self._dropout if self.training else 0.0
        # Heads differ over tensor parallel ranks; with sequence parallelism the block has forked already.
        forked = dropout > 0 and not self._spread_tokens
        with get_cuda_rng_tracker().fork() if forked else nullcontext():
            out, _ = packed_attention(
                self,
                query.permute(1, 2, 0, 3),
                key.permute(1, 2, 0, 3),
                value.permute(1, 2, 0, 3),
                attention_mask,
                segments=segments,
                scaling=self._scale,
                dropout=dropout,
            )
        return out[0].reshape(len(query), 1, -1)


class ScalarHead(nn.Module):
    """One linear map to a scalar without bias, in float32; every rank of its stage has all of it."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden_size))

    def forward(self, hidden: Tensor) -> Tensor:
        return nn.functional.linear(hidden, self.weight)


class PackedGPT(GPTModel):  # type: ignore[misc]
    """Runs embedding and layers of one stage over packed tokens; the engine runs the head where the loss is."""

    inverse_frequencies: Tensor
    true_vocab_size: int
    """Without the rows that make the vocabulary divide evenly."""
    padding_id: int | None
    """The token that the model looks up without a gradient, where it has one."""
    joins_key_heads: bool
    """Whether checkpoints have the projections of Gated DeltaNet key head by key head."""
    images: StageImages | None
    """Tower and positions of a vision-language model."""

    def forward(self, tokens: TokenSlice, context: Comm, batch: SequenceBatch) -> Tensor:
        """Hidden states ``[L, 1, H]`` (``L / tp`` with sequence parallelism) for ``tokens`` of ``batch``."""
        hidden = self._embedded(tokens.input_ids) if self.pre_process else None
        places = levels = None
        if hidden is not None and self.images is not None:
            features = self.images.features(batch, tokens)
            places = features.places
            hidden = hidden.index_copy(0, places, features.hidden[:, None])
            levels = torch.stack(features.levels) if features.levels else None
        if hidden is not None and self.config.recompute_granularity == "full" and torch.is_grad_enabled():
            # Under a frozen embedding: recomputed layers (tensor_parallel/random.py) have a gradient only
            # where an input has a gradient.
            hidden.requires_grad_()
        cos, sin = self._angles(batch, tokens)
        segments = tokens.attention(context)
        segments.prepare(tokens.input_ids.device)
        output: Tensor = self.decoder(
            hidden_states=hidden,
            attention_mask=None,
            context=levels,
            packed_seq_params=_PackedParams(segments=segments, cos=cos, sin=sin, places=places),
        )
        return output

    def _angles(self, batch: SequenceBatch, tokens: TokenSlice) -> tuple[Tensor, Tensor]:
        """Cosines and sines ``[L, 1, 1, D]`` of the rotary angles of each token, in the compute dtype."""
        dtype = cast("torch.dtype", self.config.pipeline_dtype)
        images = self.images
        positions = tokens.position_ids[:, None] if images is None else images.positions(batch, tokens)
        angles = (positions.float() * self.inverse_frequencies).repeat(1, 2)[:, None, None]
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def _embedded(self, ids: Tensor) -> Tensor:
        """``[L, 1, H]`` of ``ids [L]``. As in transformers (``padding_idx``), which Megatron's embedding does not know,
        the padding token has no gradient here; it may have one as a target, and in answers that contain it.
        """
        # In new strides: of Megatron's transposed ``[1, L, H]``, torch's matmul with a frozen weight makes L products
        # of one row each (LinearAlgebra.cpp: ``should_fold``), which is slow and rounds in another way.
        hidden: Tensor = self.embedding(ids[None], None).flatten(0, 1).unsqueeze(1)
        if self.padding_id is None:
            return hidden
        if self.config.sequence_parallel:
            ids = ids.chunk(self.config.tensor_model_parallel_size)[mpu.get_tensor_model_parallel_rank()]
        return torch.where((ids == self.padding_id)[:, None, None], hidden.detach(), hidden)

    def head_weight(self) -> Tensor:
        """This rank's rows of the language-model head, ``[V / tp, H]``, without padding."""
        weight: Tensor = (
            self.shared_embedding_or_output_weight()
            if self.share_embeddings_and_output_weights
            else self.output_layer.weight
        )
        return weight[: self.true_vocab_size - mpu.get_tensor_model_parallel_rank() * len(weight)]


def build_chunk(
    config: TransformerConfig, model: PreTrainedModel, head: Head, virtual_stage: int | None, *, grouped: bool
) -> PackedGPT:
    """The layers of ``model`` that one (virtual) stage has, uninitialised, in float32; experts ``grouped`` or apart.

    Raises `UnsupportedCapability` for rotary frequencies other than `FIXED_ROPE`.
    """
    first = mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=virtual_stage)
    last = mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=virtual_stage)
    text = model.config.get_text_config()
    size = text.vocab_size
    chunk = PackedGPT(
        config=config,
        transformer_layer_spec=_block_spec(config, text, virtual_stage, grouped=grouped),
        vocab_size=size + -size % config.tensor_model_parallel_size,
        max_sequence_length=text.max_position_embeddings,
        pre_process=first,
        post_process=last,
        share_embeddings_and_output_weights=head == "lm" and _is_tied(model),
        position_embedding_type="none",
        vp_stage=virtual_stage,
    )
    if last and head != "lm":
        chunk.output_layer = ScalarHead(text.hidden_size)
    chunk.true_vocab_size = size
    chunk.padding_id = cast("nn.Embedding", model.get_input_embeddings()).padding_idx
    chunk.joins_key_heads = text.model_type in BY_KEY_HEAD
    chunk.register_buffer("inverse_frequencies", rotary_frequencies(model), persistent=False)
    chunk.images = StageImages(model, tower=first) if has_tower(model.config) else None
    for level in range(level_count(model.config) if first else 0):
        chunk.decoder.layers[level].register_forward_hook(level_adder(level), with_kwargs=True)
    return chunk


def _is_tied(model: PreTrainedModel) -> bool:
    """Whether the head of ``model`` is its embedding, of which a text model next to a tower may have no field."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    return cast("nn.Linear", head).weight is cast("nn.Embedding", embedding).weight


def _block_spec(
    config: TransformerConfig, model: PretrainedConfig, virtual_stage: int | None, *, grouped: bool
) -> TransformerBlockSubmodules:
    """Megatron's local layers with the norms of this package, or TransformerEngine's layers; and in either the
    attention, the router and the experts of this package. No test has run TransformerEngine's layers.
    """
    norm = ZeroCenteredRMSNorm if is_hybrid(model) else RMSNorm
    theirs = config.transformer_impl == "transformer_engine"
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=theirs, normalization=config.normalization, vp_stage=virtual_stage
    )
    linear = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    experts = ModuleSpec(GroupedExperts) if grouped else ModuleSpec(SequentialMLP, submodules=linear)
    if not theirs:
        block.layer_norm = norm
    for layer in (spec.submodules for spec in block.layer_specs):
        attention, mlp = submodules_of(layer.self_attention), submodules_of(layer.mlp)
        attention.core_attention = PackedCoreAttention
        if not theirs:
            layer.input_layernorm = layer.pre_mlp_layernorm = norm
        if config.qk_layernorm and not theirs:
            attention.q_layernorm = attention.k_layernorm = norm
        if isinstance(mlp, MoESubmodules):
            mlp.router, mlp.experts = PackedRouter, experts
            mlp.shared_experts = ModuleSpec(SharedExpert, submodules=linear)
    if is_hybrid(model):
        _use_delta_net(
            block, model.layer_types[get_transformer_layer_offset(config, vp_stage=virtual_stage) :]
        )
    return block


def _use_delta_net(block: TransformerBlockSubmodules, kinds: Sequence[str]) -> None:
    """Gated DeltaNet in the place of attention, in layers whose kind is ``linear_attention``."""
    # Its module loads a package that no other family needs.
    from core_rl_megatron.delta_net import delta_net_spec

    delta_net = delta_net_spec(RMSNorm)
    # Layers of one kind share their spec.
    block.layer_specs = [
        replace(layer, submodules=replace(layer.submodules, self_attention=delta_net))
        if kind == "linear_attention"
        else layer
        for layer, kind in zip(block.layer_specs, kinds, strict=False)
    ]
