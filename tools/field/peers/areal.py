"""AReaL's FSDP engines, by `compute_logp` and `train_batch`, with attention within each sequence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from areal.api import FinetuneSpec
from areal.api.cli_args import PPOActorConfig, PPOCriticConfig
from areal.engine.fsdp_engine import FSDPPPOActor, FSDPPPOCritic
from core_rl_areal.adapter import engine_fields
from core_rl_areal.attention import PACKED
from packaging.version import Version
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from core_rl.config.engine import DType
from field.models import Pictured
from field.peers.interface import NotRun, Peer, setup_of

NEWEST = Version("5.3.0")
"""The newest transformers in the metadata of AReaL 1.0.4."""


class ArealPeer(Peer):
    """`FSDPPPOActor`."""

    def open(self, model_dir: str, dtype: DType) -> None:
        config = PPOActorConfig(**_config(model_dir, dtype), ppo_n_minibatches=1)
        self._engine = _initialized(FSDPPPOActor(config))

    @property
    def model(self) -> nn.Module:
        module: nn.Module = self._engine.model
        return module

    def logprobs(self, sequences: Sequence[Tensor], temperature: float = 1.0) -> list[Tensor]:
        self._engine.config.temperature = temperature
        rows = self._engine.compute_logp([_row(ids) for ids in sequences])
        # A log-prob stands at the token before it.
        return [row.flatten()[: len(ids) - 1] for row, ids in zip(rows, sequences, strict=True)]

    def critic(self, model_dir: str, sequences: Sequence[Tensor], disable_dropout: bool) -> Tensor:
        fields = _config(model_dir, "float32") | {"is_critic": True, "disable_dropout": disable_dropout}
        return _training_values(_initialized(FSDPPPOCritic(PPOCriticConfig(**fields))), sequences)

    def image_logprobs(self, model_dir: str, sequences: Sequence[Pictured]) -> list[Tensor]:
        if Version(transformers.__version__) > NEWEST:
            raise NotRun(
                f"allows transformers up to {NEWEST}; above it, the bounds of the text (cu_seqlens) reach the tower"
            )
        config = PPOActorConfig(**_config(model_dir, "float32"), ppo_n_minibatches=1)
        # The tower keeps images apart itself.
        engine = _initialized(FSDPPPOActor(config), {"text_config": PACKED, "vision_config": "sdpa"})
        image = engine.model_config.image_token_id
        rows = engine.compute_logp(
            [
                {
                    **_row(row.ids),
                    "mm_token_type_ids": (row.ids == image).int()[None],
                    "multi_modal_input": [dict(row.media)],
                }
                for row in sequences
            ]
        )
        return [part.flatten()[: len(row.ids) - 1] for part, row in zip(rows, sequences, strict=True)]


def _training_values(engine: Any, sequences: Sequence[Tensor]) -> Tensor:
    seen: list[Tensor] = []

    def loss(values: Tensor, _data: Any) -> Tensor:
        seen.append(values.detach().flatten().clone())
        return values.sum()

    length = max(len(ids) for ids in sequences)
    batch = {
        "input_ids": pad_sequence(list(sequences), batch_first=True),
        "attention_mask": torch.stack([(torch.arange(length) < len(ids)).long() for ids in sequences]),
    }
    batch["loss_mask"] = batch["attention_mask"]
    for _ in range(2):
        engine.train()
        engine.train_batch(batch, loss, lambda data: data["loss_mask"].count_nonzero())
    return torch.stack(seen)


def _initialized(engine: Any, attention: str | dict[str, str] = PACKED) -> Any:
    # AReaL's configuration refuses attention that is registered with transformers.
    engine.config.attn_impl = attention
    engine.create_process_group()
    engine.initialize(None, FinetuneSpec(total_train_epochs=1, dataset_size=8, train_batch_size=1))
    return engine


def _config(model_dir: str, dtype: DType) -> dict[str, Any]:
    """Fields of `TrainEngineConfig` for a copy of the model with a tokenizer, since the engine loads one."""
    return engine_fields(setup_of(model_dir, dtype), Path(model_dir) / "with-tokenizer")


def _row(ids: Tensor) -> dict[str, Tensor]:
    ones = torch.ones_like(ids)[None]
    return {"input_ids": ids[None], "attention_mask": ones, "loss_mask": ones}
