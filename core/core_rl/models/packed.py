"""A Hugging Face model over packed batches: one trunk pass, then the head on the positions that need it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from core_rl.config.engine import Head
from core_rl.data.batch import SequenceBatch
from core_rl.engines.outputs import OutputName
from core_rl.errors import ConfigError
from core_rl.models.attention import Segments
from core_rl.models.collectives import add_up, enter, gather
from core_rl.models.routers import Routers, Routing
from core_rl.models.shards import WHOLE, ModelShards, TokenSlice
from core_rl.numerics.token_logprobs import HeadMap, token_logits, token_logprobs

__all__ = ["PackedModel"]


class PackedModel(nn.Module):
    """Wraps a model that was built with `PACKED_ATTENTION`.

    The head runs inside ``forward``, so that wrappers which gather parameters around a module's
    forward (FSDP, DDP) see it. Parameter names are the wrapped model's behind the prefix ``model.``.
    """

    def __init__(self, model: PreTrainedModel, head: Head, shards: ModelShards = WHOLE) -> None:
        super().__init__()
        self.model = model
        self.head = head
        self.shards = shards
        self._routers = Routers(model)
        text = model.config.get_text_config()
        self._vocab_size = int(text.vocab_size)
        self._scale = float(getattr(text, "logit_scale", None) or 1.0) / float(
            getattr(text, "logits_scaling", 1.0) or 1.0
        )
        self._softcap: float | None = getattr(text, "final_logit_softcapping", None)

    def forward(
        self,
        batch: SequenceBatch,
        outputs: Sequence[OutputName],
        temperature: float = 1.0,
        trained_only: bool = False,
    ) -> dict[str, Tensor]:
        """The fields of a `ModelOutput` for ``batch``; a dictionary, since wrappers look into those.

        With ``trained_only`` the language-model head runs on the positions of ``loss_mask`` alone and
        the other outputs are 0.
        """
        tokens = self.shards.slice_of(batch)
        with self._routers.watch(_own_routing(batch, tokens)) as routings:
            hidden = self.model.base_model(
                input_ids=tokens.input_ids[None],
                position_ids=tokens.position_ids[None],
                attention_mask=None,
                use_cache=False,
                segments=Segments(tokens.segments, self.shards.context),
            ).last_hidden_state[0]
        if self.shards.sequence_parallel:
            # The language-model head is spread over the ranks, the scalar heads are not.
            hidden = gather(hidden, self.shards.tensor, 0, partial=self.head == "lm")
        if self.head == "lm":
            found = self._language_model(hidden, tokens, batch, outputs, temperature, trained_only)
        else:
            found = self._scalar(hidden, tokens, batch)
        if "aux_loss" in outputs or "routing" in outputs:
            whole = [self._whole_routing(routing, batch.num_tokens) for routing in routings]
            found |= self._routers.outputs(whole, batch.cu_seqlens, outputs)
        return found

    def _whole_routing(self, routing: Routing, length: int) -> Routing:
        """Of all ``length`` tokens, without padding, on every rank that sees some of them."""
        logits = gather(routing.logits, self.shards.context, 0, partial=False)
        experts = gather(routing.experts, self.shards.context, 0, partial=False)
        return Routing(logits[:length], experts[:length])

    def _language_model(
        self,
        hidden: Tensor,
        tokens: TokenSlice,
        batch: SequenceBatch,
        outputs: Sequence[OutputName],
        temperature: float,
        trained_only: bool,
    ) -> dict[str, Tensor]:
        weight, bias = self._output_embeddings()
        mapping = HeadMap(scale=self._scale, softcap=self._softcap, temperature=temperature)
        predicted = (batch.loss_mask if trained_only else _not_first(batch)).nonzero().squeeze(1)
        which, states_at = tokens.here(predicted - 1)
        predicted = predicted[which]
        states = hidden[states_at]
        if not self.shards.sequence_parallel:
            states = enter(states, self.shards.tensor)
        found: dict[str, Tensor] = {}
        if "logprobs" in outputs or "entropy" in outputs:
            logprobs, entropy = token_logprobs(
                states,
                weight,
                batch.input_ids[predicted],
                bias=bias,
                head=mapping,
                with_entropy="entropy" in outputs,
                vocabulary=self.shards.vocabulary(self._vocab_size),
            )
            found = {"logprobs": logprobs} | ({} if entropy is None else {"entropy": entropy})
        if "logits" in outputs:
            found["logits"] = self._whole_rows(token_logits(states, weight, bias=bias, head=mapping))
        return {
            name: self._placed(value, predicted, batch.num_tokens)
            for name, value in found.items()
            if name in outputs
        }

    def _output_embeddings(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of the language-model head, this rank's rows."""
        head = self.model.get_output_embeddings()
        if not isinstance(head, nn.Module) or not isinstance(head.weight, Tensor):
            raise ConfigError(
                f"{type(self.model).__name__} has no output embeddings, so it gives no log-probs"
            )
        bias = getattr(head, "bias", None)
        return _own(head.weight), None if bias is None else _own(bias)

    def _whole_rows(self, logits: Tensor) -> Tensor:
        """Logits over the whole vocabulary, from this rank's columns."""
        if self.shards.tensor.size == 1:
            return logits
        padded = F.pad(logits, (0, -(-self._vocab_size // self.shards.tensor.size) - logits.shape[1]))
        return gather(padded, self.shards.tensor, 1, partial=False)[:, : self._vocab_size]

    def _placed(self, values: Tensor, positions: Tensor, length: int) -> Tensor:
        """``length`` entries, 0 but for ``values`` at ``positions`` on the rank that has them."""
        own = values.new_zeros((length, *values.shape[1:])).index_copy(0, positions, values)
        return add_up(own, self.shards.context)

    def _scalar(self, hidden: Tensor, tokens: TokenSlice, batch: SequenceBatch) -> dict[str, Tensor]:
        score = self.model.score
        assert isinstance(score, nn.Module)  # every ...ForSequenceClassification has it
        states = score(hidden.float()).squeeze(-1)
        which, last = tokens.here(batch.cu_seqlens[1:].long().to(states.device) - 1)
        final = self._placed(states[last], which, batch.num_sequences)
        if self.head == "reward":
            return {"scores": final}
        later = _not_first(batch).nonzero().squeeze(1)
        which, before = tokens.here(later - 1)
        values = self._placed(states[before], later[which], batch.num_tokens)
        return {"values": values, "bootstrap": final}


def _own_routing(batch: SequenceBatch, tokens: TokenSlice) -> Tensor | None:
    """The experts that ``batch`` prescribes for the tokens of this rank, ``[L, layers, k]``; any for padding."""
    routing = batch.tokens.get("routing")
    if routing is None:
        return None
    padded = F.pad(routing, (0, 0, 0, 0, 0, tokens.segments[-1] - len(routing)))
    own = padded[tokens.start : tokens.start + len(tokens.input_ids)]
    return own.to(tokens.input_ids.device)


def _own(parameter: Tensor) -> Tensor:
    """This rank's part of a parameter, with its graph."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _not_first(batch: SequenceBatch) -> Tensor:
    """Bool ``[T]``: all but the first token of each sequence."""
    mask = torch.ones_like(batch.input_ids, dtype=torch.bool)
    mask[batch.cu_seqlens[:-1].long().to(mask.device)] = False
    return mask
