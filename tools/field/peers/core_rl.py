"""core-rl's engine `fsdp`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from core_rl import LossSpec, Metric, MicroBatchSpec, SequenceBatch, load_config, load_engine
from core_rl.config.engine import DType
from core_rl.data.outputs import ModelOutput
from core_rl.engine.train import TrainEngine
from field.models import Pictured
from field.peers.interface import NotRun, Peer

BUDGET = MicroBatchSpec(max_tokens=1 << 16)


class CoreRLPeer(Peer):
    """`fsdp` on one rank."""

    def open(self, model_dir: str, dtype: DType) -> None:
        self._engine = _engine({"path": model_dir}, dtype)

    @property
    def model(self) -> nn.Module:
        raise NotImplementedError("the engine gives its logits itself")

    def logprobs(self, sequences: Sequence[Tensor], temperature: float = 1.0) -> list[Tensor]:
        batch = SequenceBatch.from_sequences(sequences)
        output = self._engine.forward(batch, BUDGET, temperature=temperature)["logprobs"]
        return [part[1:] for part in output.split([len(ids) for ids in sequences])]

    def logits(self, sequence: Tensor) -> Tensor:
        batch = SequenceBatch.from_sequences([sequence])
        logits: Tensor = self._engine.forward(batch, BUDGET, outputs=("logits",))["logits"]
        # They stand at the token that they predict.
        return logits.roll(-1, 0)

    def critic(self, model_dir: str, sequences: Sequence[Tensor], disable_dropout: bool) -> Tensor:
        if disable_dropout:
            raise NotRun("has no such setting")
        return _training_values(_engine({"path": model_dir, "head": "value"}, "float32"), sequences)

    def image_logprobs(self, model_dir: str, sequences: Sequence[Pictured]) -> list[Tensor]:
        engine = _engine({"path": model_dir, "vision": True}, "float32")
        batch = SequenceBatch.from_sequences(
            [row.ids for row in sequences], media=[row.media for row in sequences]
        )
        logprobs = engine.forward(batch, BUDGET)["logprobs"]
        return [part[1:] for part in logprobs.split(batch.lengths)]


def _training_values(engine: TrainEngine, sequences: Sequence[Tensor]) -> Tensor:
    seen: list[Tensor] = []

    def loss(output: ModelOutput, _batch: SequenceBatch) -> tuple[Tensor, dict[str, Metric]]:
        seen.append(output["values"].detach().clone())
        return output["values"].sum(), {}

    for _ in range(2):
        engine.forward_backward(
            SequenceBatch.from_sequences(sequences), LossSpec(fn=loss, outputs=("values",)), BUDGET
        )
        engine.optimizer_zero_grad()
    return torch.stack(seen)


def _engine(model: dict[str, object], dtype: DType) -> TrainEngine:
    config = load_config("fsdp")(model=model, dtype=dtype)
    engine = load_engine("fsdp", config)
    assert isinstance(engine, TrainEngine)
    engine.initialize()
    return engine
