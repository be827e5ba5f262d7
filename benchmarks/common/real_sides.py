"""The model and the steps of `real_size.py`, each side in a process of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor, multiprocessing

from common.bare_half import full_step, lora_step
from common.engine import engine_step, start_engine
from common.memory import forget_peak, resident
from common.workload import make_batch
from core_rl.data.batch import SequenceBatch

__all__ = ["LENGTHS", "QWEN2_5_0_5B", "Cost", "Line", "steps_of"]

QWEN2_5_0_5B: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151_936,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
LENGTHS = [200, 150, 100, 62]
"""Lengths of the sequences of a step: 512 tokens, in one micro-batch."""
LORA_RANK = 8
ByHand = Callable[[str, Sequence[Tensor]], Callable[[], object]]


@dataclass(frozen=True)
class Line:
    """A figure and its aim: the most that it should be."""

    what: str
    figure: str
    value: float
    aim: float


@dataclass(frozen=True)
class Cost:
    """Cost of a step."""

    cpu_s: float
    """CPU seconds of all threads, in the kernel too."""
    wall_s: float
    peak: int
    """The resident set at its highest, in bytes: weights that a loop uses in its mapped files count as well."""


def _engine(path: str, batch: SequenceBatch, **model: Any) -> Callable[[], object]:
    fields = {"model": {"path": path, **model}, "dtype": "bfloat16", "device": "cpu"}
    return engine_step(start_engine("fsdp", None, fields), batch, batch.num_tokens)


def _by_hand(step: ByHand, path: str, batch: SequenceBatch) -> Callable[[], object]:
    return step(path, batch.input_ids.split(batch.lengths))


SIDES: Mapping[str, Callable[[str, SequenceBatch], Callable[[], object]]] = {
    "engine": _engine,
    "by hand": partial(_by_hand, full_step),
    "engine, LoRA": partial(_engine, lora={"rank": LORA_RANK}),
    "by hand, LoRA": partial(_by_hand, partial(lora_step, rank=LORA_RANK)),
}


def steps_of(
    side: str, path: str, lengths: list[int], vocabulary: int, *, warmup: int, count: int
) -> list[Cost]:
    """``count`` steps of ``side`` after ``warmup`` others, in a fresh process with one thread."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_take, args=(sender, side, path, lengths, vocabulary, warmup + count))
    process.start()
    sender.close()
    costs: list[Cost] = receiver.recv()
    process.join()
    return costs[warmup:]


def _take(
    connection: Connection, side: str, path: str, lengths: list[int], vocabulary: int, count: int
) -> None:
    torch.set_num_threads(1)
    step = SIDES[side](path, make_batch(lengths, vocabulary))
    connection.send([_cost(step) for _ in range(count)])


def _cost(step: Callable[[], object]) -> Cost:
    forget_peak()
    cpu, wall = time.process_time(), time.perf_counter()
    step()
    return Cost(time.process_time() - cpu, time.perf_counter() - wall, resident("VmHWM"))
