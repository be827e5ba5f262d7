"""The list of files of a training step in docs/architecture.md."""

from __future__ import annotations

import torch
from torch import Tensor
from traced_files import listed_files, start_trace, stop_trace, traced_files

from core_rl import EngineGroup, LossSpec, MicroBatchSpec, ModelOutput, SequenceBatch
from core_rl.backend.metrics import Metric
from core_rl.engine.train import TrainEngine

MODEL = {
    "config": {
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
}


def negative_logprobs(output: ModelOutput, batch: SequenceBatch) -> tuple[Tensor, dict[str, Metric]]:
    total = -output["logprobs"].sum()
    return total, {"nll": Metric.mean(total, batch.loss_mask.sum())}


def start_in_rank(_: TrainEngine) -> None:
    start_trace()


def stop_in_rank(_: TrainEngine) -> frozenset[str]:
    files = traced_files()
    stop_trace()
    return files


def test_page_lists_files_of_a_training_step() -> None:
    mask = torch.ones(8, dtype=torch.bool)
    batch = SequenceBatch.from_sequences(
        [torch.arange(8) + number for number in range(4)], tokens={"loss_mask": [mask] * 4}
    )
    loss, micro_batches = LossSpec(fn=negative_logprobs), MicroBatchSpec(max_tokens=16)
    with EngineGroup("fsdp", model=MODEL, layout={"dp": 2}, device="cpu") as group:
        group.train_batch(batch, loss, micro_batches)  # values computed once
        group.run(start_in_rank)
        start_trace()
        group.train_batch(batch, loss, micro_batches)
        driver = traced_files()
        stop_trace()
        rank = group.run(stop_in_rank)[0]
    listed = listed_files("architecture.md", "## The life of a training step")
    not_listed, not_run = (driver | rank) - set(listed), set(listed) - (driver | rank)
    assert not not_listed and not not_run, f"not listed: {sorted(not_listed)}; not run: {sorted(not_run)}"
