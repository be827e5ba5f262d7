"""transformers' models on rows of its `DataCollatorWithFlattening` as it is by default: with positions alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DataCollatorWithFlattening,
    PreTrainedModel,
)

from core_rl.config.engine import DType
from field.models import Pictured
from field.peers.interface import NotRun, Peer


class TransformersPeer(Peer):
    """`AutoModelForCausalLM` with its default attention."""

    def open(self, model_dir: str, dtype: DType) -> None:
        if dtype != "float32":
            raise NotRun("has no temperature in training")
        self._model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()

    @property
    def model(self) -> nn.Module:
        module: nn.Module = self._model
        return module

    def logprobs(self, sequences: Sequence[Tensor], temperature: float = 1.0) -> list[Tensor]:
        return _logprobs(self._model, sequences, temperature, {})

    def image_logprobs(self, model_dir: str, sequences: Sequence[Pictured]) -> list[Tensor]:
        model = AutoModelForImageTextToText.from_pretrained(model_dir, dtype=torch.float32).eval()
        # The collator leaves images out.
        media = {name: torch.cat([row.media[name] for row in sequences]) for name in sequences[0].media}
        return _logprobs(model, [row.ids for row in sequences], 1.0, media)


@torch.no_grad()
def _logprobs(
    model: PreTrainedModel, sequences: Sequence[Tensor], temperature: float, media: Mapping[str, Tensor]
) -> list[Tensor]:
    inputs = DataCollatorWithFlattening()([{"input_ids": ids.tolist()} for ids in sequences])
    labels = inputs.pop("labels")[0, 1:]
    logits = model(**inputs, **media, use_cache=False).logits[0, :-1] / temperature
    kept = labels != -100
    logprobs = logits[kept].log_softmax(-1).gather(1, labels[kept, None])[:, 0]
    return list(logprobs.split([len(ids) - 1 for ids in sequences]))
