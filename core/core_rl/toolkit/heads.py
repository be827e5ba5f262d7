"""The heads of packed models: log-probs and entropy, values and scores out of the trunk's hidden states."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig

from core_rl.config.engine import Head
from core_rl.data.batch import SequenceBatch
from core_rl.data.outputs import OutputName
from core_rl.data.pinned import to_device
from core_rl.distributed.collectives import copy_to_region, gather, reduce_from_region
from core_rl.toolkit.parallel_context import ModelShards, TokenSlice
from core_rl.toolkit.token_logprobs import HeadMap, token_logits, token_logprobs

__all__ = ["LanguageModelHead", "PackedStates", "scalar_outputs"]

FACTORS = ("logit_scale", "lm_head_multiplier")
"""Fields of configs that multiply the logits: Cohere, Falcon-H1."""
DIVISORS = ("logits_scaling",)
"""Fields that divide them: Granite."""
CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Fields with the ``c`` of ``c * tanh(logits / c)``: Gemma, RecurrentGemma, xLSTM."""


@dataclass(frozen=True)
class PackedStates:
    """Hidden states of this rank's tokens of a packed batch."""

    hidden: Tensor
    """``[L, H]``, one row for each token of ``tokens``, or with sequence parallelism a part of these rows."""
    tokens: TokenSlice
    batch: SequenceBatch
    shards: ModelShards

    def rows(self, *, partial: bool) -> Tensor:
        """All rows of ``hidden``; with ``partial`` each rank will use a part of the head on them."""
        if not self.shards.sequence_parallel:
            return self.hidden
        return gather(self.hidden, self.shards.tensor, 0, partial=partial)

    def predictions(self, trained_only: bool) -> Predictions:
        """Tokens to predict; with ``trained_only`` where the loss mask is true."""
        positions, tree = self.batch.predicted(trained_only=trained_only), self.tokens.tree
        if tree is None:
            return Predictions(positions)
        rows = tree.rows[positions]
        unique, index = rows.unique(return_inverse=True)
        first = torch.empty_like(unique).scatter_(0, index, positions)
        return Predictions(first, positions, first[index])

    def placed(self, values: Tensor, positions: Tensor, length: int) -> Tensor:
        """``length`` entries, 0 but for ``values`` at ``positions`` on the rank that has them."""
        local = values.new_zeros((length, *values.shape[1:])).index_copy(0, positions, values)
        return reduce_from_region(local, self.shards.context)


@dataclass(frozen=True)
class Predictions:
    """Tokens that a head predicts, once for all sequences that share them."""

    positions: Tensor
    """Their positions in the batch, int64 ``[N]``, on the CPU."""
    all: Tensor | None = None
    """The positions of these tokens in every sequence, int64 ``[M]``; None where none is shared."""
    computed: Tensor | None = None
    """For each of ``all``, the position in ``positions`` that its value is computed at."""

    def repeated(self, values: Tensor) -> Tensor:
        """``values [T]`` with the value of each computed position at all positions that share it."""
        if self.all is None or self.computed is None:
            return values
        targets, sources = (to_device(part, values.device) for part in (self.all, self.computed))
        return torch.zeros_like(values).index_copy(0, targets, values.index_select(0, sources))


@dataclass(frozen=True, kw_only=True)
class LanguageModelHead:
    """Log-probs, entropy and logits of the tokens of a batch, over a vocabulary that may be spread over ranks."""

    vocab_size: int
    scale: float = 1.0
    softcap: float | None = None

    @staticmethod
    def of(config: PretrainedConfig) -> LanguageModelHead:
        """The head of a model with ``config``, by the known fields."""
        text = config.get_text_config()
        scale = math.prod(float(getattr(text, name, None) or 1.0) for name in FACTORS)
        divisor = math.prod(float(getattr(text, name, None) or 1.0) for name in DIVISORS)
        caps = [float(cap) for name in CAPS if (cap := getattr(text, name, None)) is not None]
        return LanguageModelHead(
            vocab_size=int(text.vocab_size), scale=scale / divisor, softcap=caps[0] if caps else None
        )

    def outputs(
        self,
        states: PackedStates,
        weight: Tensor,
        bias: Tensor | None,
        names: Sequence[OutputName],
        temperature: float,
        trained_only: bool,
    ) -> dict[str, Tensor]:
        """The fields of a `ModelOutput` among ``names`` that this head gives.

        Args:
            states: what predicts.
            weight: this rank's rows of the head, ``[V / tp, H]``, without padding; ``bias`` is ``[V / tp]``.
            names: names of outputs.
            temperature: divides the logits.
            trained_only: run on the positions of ``loss_mask`` alone; the other outputs are 0.
        """
        batch, shards = states.batch, states.shards
        mapping = HeadMap(scale=self.scale, softcap=self.softcap, temperature=temperature)
        predictions, device = states.predictions(trained_only), batch.device
        which, before = states.tokens.here(predictions.positions - 1)
        predicted, states_at = to_device(predictions.positions[which], device), to_device(before, device)
        rows = states.rows(partial=True)[states_at]
        if not shards.sequence_parallel:
            rows = copy_to_region(rows, shards.tensor)
        computed: dict[str, Tensor] = {}
        if "logprobs" in names or "entropy" in names:
            logprobs, entropy = token_logprobs(
                rows,
                weight,
                batch.input_ids[predicted],
                bias=bias,
                head=mapping,
                with_entropy="entropy" in names,
                vocabulary=shards.vocabulary(self.vocab_size),
            )
            computed = {"logprobs": logprobs} | ({} if entropy is None else {"entropy": entropy})
        if "logits" in names:
            logits = token_logits(rows, weight, bias=bias, head=mapping)
            computed["logits"] = self._whole_rows(logits, shards)
        return {
            name: predictions.repeated(states.placed(value, predicted, batch.num_tokens))
            for name, value in computed.items()
            if name in names
        }

    def _whole_rows(self, logits: Tensor, shards: ModelShards) -> Tensor:
        """Logits over the whole vocabulary, from this rank's columns."""
        if shards.tensor.size == 1:
            return logits
        padded = F.pad(logits, (0, -(-self.vocab_size // shards.tensor.size) - logits.shape[1]))
        return gather(padded, shards.tensor, 1, partial=False)[:, : self.vocab_size]


def scalar_outputs(states: PackedStates, score: Callable[[Tensor], Tensor], head: Head) -> dict[str, Tensor]:
    """The fields of a `ModelOutput` that a ``value`` or ``reward`` head gives.

    ``score`` maps float32 states ``[L, H]`` to ``[L, 1]``; all ranks have all of it.
    """
    batch, tokens = states.batch, states.tokens
    scores = score(states.rows(partial=False).float()).squeeze(-1)
    which, last = (to_device(index, scores.device) for index in tokens.here(batch.cu_seqlens[1:].long() - 1))
    final = states.placed(scores[last], which, batch.num_sequences)
    if head == "reward":
        return {"scores": final}
    later = batch.predicted(trained_only=False)
    which, before = tokens.here(later - 1)
    positions = to_device(later[which], scores.device)
    values = states.placed(scores[to_device(before, scores.device)], positions, batch.num_tokens)
    return {"values": values, "bootstrap": final}
