"""A Hugging Face model over packed batches: one trunk pass, then the head on the positions that need it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from core_rl.config.engine import Head
from core_rl.data.batch import SequenceBatch
from core_rl.engines.outputs import OutputName
from core_rl.errors import ConfigError
from core_rl.numerics.token_logprobs import HeadMap, token_logits, token_logprobs

__all__ = ["PackedModel"]


class PackedModel(nn.Module):
    """Wraps a model that was built with `PACKED_ATTENTION`.

    The head runs inside ``forward``, so that wrappers which gather parameters around a module's
    forward (FSDP, DDP) see it. Parameter names are the wrapped model's behind the prefix ``model.``.
    """

    def __init__(self, model: PreTrainedModel, head: Head) -> None:
        super().__init__()
        self.model = model
        self.head = head
        text = model.config.get_text_config()
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
        hidden = self.model.base_model(
            input_ids=batch.input_ids[None],
            position_ids=batch.position_ids[None],
            attention_mask=None,
            use_cache=False,
            segments=tuple(batch.cu_seqlens.tolist()),
        ).last_hidden_state[0]
        if self.head == "lm":
            return self._language_model(hidden, batch, outputs, temperature, trained_only)
        return self._scalar(hidden, batch)

    def _language_model(
        self,
        hidden: Tensor,
        batch: SequenceBatch,
        outputs: Sequence[OutputName],
        temperature: float,
        trained_only: bool,
    ) -> dict[str, Tensor]:
        head = self.model.get_output_embeddings()
        if not isinstance(head, nn.Module) or not isinstance(head.weight, Tensor):
            raise ConfigError(
                f"{type(self.model).__name__} has no output embeddings, so it gives no log-probs"
            )
        mapping = HeadMap(scale=self._scale, softcap=self._softcap, temperature=temperature)
        bias = getattr(head, "bias", None)
        predicted = (batch.loss_mask if trained_only else _not_first(batch)).nonzero().squeeze(1)
        states = hidden[predicted - 1]
        found: dict[str, Tensor] = {}
        if "logprobs" in outputs or "entropy" in outputs:
            logprobs, entropy = token_logprobs(
                states,
                head.weight,
                batch.input_ids[predicted],
                bias=bias,
                head=mapping,
                with_entropy="entropy" in outputs,
            )
            found = {"logprobs": logprobs} | ({} if entropy is None else {"entropy": entropy})
        if "logits" in outputs:
            found["logits"] = token_logits(states, head.weight, bias=bias, head=mapping)
        return {
            name: value.new_zeros((batch.num_tokens, *value.shape[1:])).index_copy(0, predicted, value)
            for name, value in found.items()
            if name in outputs
        }

    def _scalar(self, hidden: Tensor, batch: SequenceBatch) -> dict[str, Tensor]:
        score = self.model.score
        assert isinstance(score, nn.Module)  # every ...ForSequenceClassification has it
        states = score(hidden.float()).squeeze(-1)
        last = states[(batch.cu_seqlens[1:].long() - 1).to(states.device)]
        if self.head == "reward":
            return {"scores": last}
        values = torch.where(_not_first(batch), states.roll(1), states.new_zeros(()))
        return {"values": values, "bootstrap": last}


def _not_first(batch: SequenceBatch) -> Tensor:
    """Bool ``[T]``: all but the first token of each sequence."""
    mask = torch.ones_like(batch.input_ids, dtype=torch.bool)
    mask[batch.cu_seqlens[:-1].long().to(mask.device)] = False
    return mask
