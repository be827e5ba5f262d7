"""TRL's fused language-model head, which its trainers add to a model, on rows of its padding-free collator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from core_rl_trl.black_box import make_tokenizer
from datasets import Dataset
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedTokenizerFast,
    ProcessorMixin,
)
from trl import SFTConfig, SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling
from trl.trainer.utils import add_fused_lm_head

from core_rl.config.engine import DType
from field.models import Pictured
from field.peers.interface import NotRun, Peer


class _Processor(ProcessorMixin):
    """A trainer knows a vision-language model by this."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        super().__init__(tokenizer)  # type: ignore[no-untyped-call]


class TRLPeer(Peer):
    """`SFTTrainer` with ``padding_free=True``; temperatures as in `GRPOTrainer`, and ``bf16=True`` for bfloat16."""

    def open(self, model_dir: str, dtype: DType) -> None:
        # As Trainer does: float32 weights, and autocast for bfloat16.
        self._model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
        self._plain_forward = self._model.forward
        self._autocast = torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16")

    @property
    def model(self) -> nn.Module:
        module: nn.Module = self._model
        return module

    def logprobs(self, sequences: Sequence[Tensor], temperature: float = 1.0) -> list[Tensor]:
        self._model.forward = self._plain_forward
        add_fused_lm_head(self._model, temperature=temperature)
        collator = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
        inputs: dict[str, Any] = collator([{"input_ids": ids.tolist()} for ids in sequences])
        with torch.no_grad(), self._autocast:
            output = self._model(**inputs, fused_lm_head=True)
        # The first token of each sequence has no label.
        kept: Tensor = output.log_probs[output.label_mask]
        return list(kept.split([len(ids) - 1 for ids in sequences]))

    def image_logprobs(self, model_dir: str, sequences: Sequence[Pictured]) -> list[Tensor]:
        """Raises the error of a trainer with ``padding_free=True`` and images."""
        model = AutoModelForImageTextToText.from_pretrained(model_dir, dtype=torch.float32)
        data = Dataset.from_list([{"text": "", "images": []}])
        config = SFTConfig(
            output_dir=model_dir, padding_free=True, max_length=None, report_to="none", use_cpu=True
        )
        SFTTrainer(
            model, config, train_dataset=data, processing_class=_Processor(make_tokenizer(vocab_size=2))
        )
        raise NotRun("this version packs images; measure it")

    def logits(self, sequence: Tensor) -> Tensor:
        self._model.forward = self._plain_forward
        with torch.no_grad(), self._autocast:
            logits: Tensor = self._model(input_ids=sequence[None]).logits[0]
        return logits
