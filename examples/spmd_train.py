r"""Train on texts in every process that ``torchrun`` starts, on one machine or several, without a driver.

    torchrun --nproc-per-node=4 examples/spmd_train.py --model MODEL --data texts.jsonl --layout '{"dp": 2, "tp": 2}'

On two machines, the same command on each, with the address of the first:

    torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 --rdzv-id=1 \
        examples/spmd_train.py --model MODEL --data texts.jsonl --layout '{"dp": 16}'

``texts.jsonl`` has one ``{"text": …}`` in each line. ``--output`` gets the model in Hugging Face format, on a path that
all machines share. Rank 0 prints the metrics of each step as JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from core_rl import (
    FinetuneSpec,
    LossSpec,
    Metric,
    MicroBatchSpec,
    ModelOutput,
    SaveLoadMeta,
    SequenceBatch,
    TrainEngine,
    load_config,
    load_engine,
)
from core_rl.config.base import parse_config

BUDGET = MicroBatchSpec(max_tokens=8192)


def negative_log_likelihood(output: ModelOutput, batch: SequenceBatch) -> tuple[Tensor, Mapping[str, Metric]]:
    """The sum over the trained tokens."""
    return -torch.where(batch.loss_mask, output["logprobs"], 0.0).sum(), {}


LOSS = LossSpec(fn=negative_log_likelihood)


def read_texts(path: Path, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """The tokens of each text, its end included."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [[*tokenizer(json.loads(line)["text"])["input_ids"], tokenizer.eos_token_id] for line in lines]


def make_batch(texts: Sequence[Sequence[int]], step: int, size: int) -> SequenceBatch:
    """The texts of one step, on all ranks alike; after the last text comes the first."""
    return SequenceBatch.from_sequences([texts[(step * size + n) % len(texts)] for n in range(size)])


def main() -> None:
    """Train, save, and leave."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", default="fsdp")
    parser.add_argument("--model", required=True, help="a directory in Hugging Face format, or a Hub id")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--layout", type=json.loads, default={}, help="parallel degrees as JSON")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--output", help="where the model is saved")
    arguments = parser.parse_args()

    fields = {
        "model": {"path": arguments.model},
        "layout": arguments.layout,
        "optimizer": {"lr": arguments.lr},
    }
    config = parse_config(load_config(arguments.engine), fields, f"the config of {arguments.engine!r}")
    texts = read_texts(arguments.data, AutoTokenizer.from_pretrained(arguments.model))
    engine = load_engine(arguments.engine, config)
    if not isinstance(engine, TrainEngine):
        parser.error(f"--engine {arguments.engine}: it is for inference; name a train engine")
    # Joins the world that the launcher names in the environment.
    engine.initialize(None, FinetuneSpec(dataset_size=arguments.steps))
    for step in range(arguments.steps):
        part = engine.shard_data(make_batch(texts, step, arguments.batch_size), BUDGET)
        metrics = engine.train_batch(part, LOSS, BUDGET)
        engine.lr_scheduler_step()
        if engine.world.rank == 0:
            sys.stdout.write(json.dumps({"step": step, **metrics}) + "\n")
            sys.stdout.flush()
    if arguments.output:
        engine.save(SaveLoadMeta(path=arguments.output, format="hf", tokenizer_path=arguments.model))
    engine.destroy()


if __name__ == "__main__":
    main()
