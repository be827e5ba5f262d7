"""transformers' models on rows of its `DataCollatorWithFlattening` as it is by default: with positions alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening

from field.peers.interface import NotRun, Peer


class TransformersPeer(Peer):
    """`AutoModelForCausalLM` with its default attention."""

    def open(self, model_dir: str, dtype: str) -> None:
        if dtype != "float32":
            raise NotRun("has no temperature in training")
        self._model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()

    @property
    def model(self) -> nn.Module:
        module: nn.Module = self._model
        return module

    def logprobs(self, sequences: Sequence[Tensor], temperature: float = 1.0) -> list[Tensor]:
        collator = DataCollatorWithFlattening()
        inputs = collator([{"input_ids": ids.tolist()} for ids in sequences])
        labels = inputs.pop("labels")[0, 1:]
        with torch.no_grad():
            logits = self._model(**inputs, use_cache=False).logits[0, :-1] / temperature
        kept = labels != -100
        logprobs = logits[kept].log_softmax(-1).gather(1, labels[kept, None])[:, 0]
        return list(logprobs.split([len(ids) - 1 for ids in sequences]))
