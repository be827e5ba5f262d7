"""torchtitan's decoder over packed batches: its own layers, with the core's attention and output head in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchtitan.models.common import Embedding, Linear
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.protocols.module import Module

from core_rl.config.engine import Head
from core_rl.data.batch import SequenceBatch
from core_rl.data.outputs import OutputName
from core_rl.data.prefixes import PrefixTree
from core_rl.errors import BatchError
from core_rl.toolkit.attention import packed_attention
from core_rl.toolkit.build import ALIGNMENT
from core_rl.toolkit.dtensor import own_part
from core_rl.toolkit.heads import LanguageModelHead, PackedStates, scalar_outputs
from core_rl.toolkit.parallel_context import ModelShards
from core_rl.toolkit.segments import Segments

HeadOutputs = Callable[[Tensor, Tensor], dict[str, Tensor]]
"""Outputs by hidden states ``[L, H]`` and this rank's rows of the head."""


class PackedAttention(Module):  # type: ignore[misc]
    """The core's attention inside each packed sequence, in the place of torchtitan's inner attention.

    torchtitan's own takes documents on CUDA alone (flex), or rounds float32 to bfloat16 (varlen). Over context parallel
    ranks this one swaps tokens for heads.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):  # type: ignore[misc]
        """No settings."""

    def __init__(self, config: Config) -> None:
        super().__init__()

    def forward(
        self,
        q_BLNH: Tensor,  # noqa: N803  (shardings name the arguments)
        k_BLNH: Tensor,  # noqa: N803
        v_BLNH: Tensor,  # noqa: N803
        *,
        attention_masks: Segments,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """``[1, T, heads, D]``, of ``key`` and ``value`` perhaps with fewer heads."""
        query, key, value = (part.transpose(1, 2) for part in (q_BLNH, k_BLNH, v_BLNH))
        attended, _ = packed_attention(self, query, key, value, None, segments=attention_masks, scaling=scale)
        return attended


class PackedEmbedding(Embedding):  # type: ignore[misc]
    """torchtitan's embedding, in which the padding token has no gradient, as in transformers (``padding_idx``).

    Over tensor parallel ranks torchtitan's own would compare the token with rows of the rank.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Embedding.Config):  # type: ignore[misc]
        """That of an embedding, and the padding token, if there is one."""

        padding_id: int | None = None

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._padding_id = config.padding_id

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (shardings name the argument)
        """This rank's part ``[1, L, H]`` of the embeddings of ``input [1, L]``."""
        hidden: Tensor = super().forward(input)
        if self._padding_id is None:
            return hidden
        return torch.where((input == self._padding_id)[..., None], hidden.detach(), hidden)


class Experts(GroupedExperts):  # type: ignore[misc]
    """torchtitan's experts in the dtype of their weights; its own round everything to bfloat16."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):  # type: ignore[misc]
        """That of torchtitan's experts."""

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:  # noqa: N803  (torchtitan's names)
        """``[R, D]`` of tokens sorted by their expert, of which this rank has some."""
        gate, down, up = (own_part(weight).mT for weight in (self.w1_EFD, self.w2_EDF, self.w3_EFD))
        ends = num_tokens_per_expert_E.cumsum(0, dtype=torch.int32)
        tokens = x_RD.to(gate.dtype)
        hidden = F.silu(self._product(tokens, gate, ends)) * self._product(tokens, up, ends)
        return self._product(hidden, down, ends).type_as(x_RD)

    def _product(self, rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        """The grouped matrix product, or one product for each expert where its kernel does not take the sizes."""
        if all(size % ALIGNMENT == 0 for size in weights.shape[1:]):
            return F.grouped_mm(rows, weights, offs=ends)
        counts = ends.diff(prepend=ends.new_zeros(1)).tolist()
        return torch.cat([part @ weight for part, weight in zip(rows.split(counts), weights, strict=True)])


class OutputHead(Linear):  # type: ignore[misc]
    """The language-model head, which gives the outputs of a pass in the place of all logits.

    It computes inside its own forward pass, for which FSDP gathers its weight.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):  # type: ignore[misc]
        """That of a linear layer."""

    outputs_of: HeadOutputs | None = None

    def forward(self, input: Tensor) -> dict[str, Tensor]:  # noqa: A002  (shardings name the argument)
        """Outputs by hidden states ``[1, L, H]``."""
        assert self.outputs_of is not None  # `PackedDecoder` sets it
        return self.outputs_of(own_part(input)[0], own_part(self.weight))


class PackedDecoder(nn.Module):
    """A `Decoder` that was built with the modules above, and its scalar head, if it has one."""

    def __init__(self, decoder: Decoder, head: Head, shards: ModelShards) -> None:
        super().__init__()
        config = decoder.config
        self.decoder = decoder
        self.head = head
        self.shards = shards
        self._positions = config.layers[0].attention.rope.max_seq_len
        self._language_model = LanguageModelHead(vocab_size=config.vocab_size)
        if head != "lm":
            decoder.lm_head = None
            self.score = nn.Linear(config.dim, 1, bias=False)

    def forward(
        self,
        batch: SequenceBatch,
        outputs: Sequence[OutputName],
        temperature: float,
        trained_only: bool,
        share_prefixes: bool = False,
    ) -> dict[str, Tensor]:
        """The fields of a `ModelOutput`, as of `PackedModel`; raises `BatchError` for a sequence that is too long."""
        if (longest := max(batch.lengths)) > self._positions:
            raise BatchError(
                f"a sequence has {longest} tokens, and torchtitan computes rotary embeddings for {self._positions} "
                "positions (max_position_embeddings); shorten or drop longer sequences"
            )
        tokens = self.shards.slice_of(batch, PrefixTree.of(batch) if share_prefixes else None)
        segments = tokens.attention(self.shards.context, self.shards.tensor)
        segments.prepare(batch.device)
        # The last norm has all tokens of this context rank again, whatever sequence parallelism did before.
        shards = ModelShards(context=self.shards.context, tensor=self.shards.tensor)

        def outputs_of(hidden: Tensor, rows: Tensor) -> dict[str, Tensor]:
            states = PackedStates(hidden, tokens, batch, shards)
            return self._language_model.outputs(states, rows, None, outputs, temperature, trained_only)

        if self.head == "lm":
            self.decoder.lm_head.outputs_of = outputs_of
        try:
            computed = self.decoder(tokens.input_ids[None], tokens.position_ids[None], segments)
        finally:
            if self.head == "lm":
                self.decoder.lm_head.outputs_of = None  # which holds the batch
        if self.head == "lm":
            result: dict[str, Tensor] = computed
            return result
        return scalar_outputs(
            PackedStates(own_part(computed)[0], tokens, batch, shards), self.score, self.head
        )
