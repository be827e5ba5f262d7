"""Model and steps of `real_size.py`: the engine, and loops written by hand with float32 masters, each in a process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, multiprocessing, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig

from common.bare import build
from common.engine import engine_step, start_engine
from common.workload import make_batch
from core_rl.data.batch import SequenceBatch

CHUNK = 128
"""Rows whose logits exist at one time."""
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


def _full_step(path: str, ids: Sequence[Tensor]) -> Callable[[], None]:
    """An optimizer step of all weights."""
    model = build({}, packed=True, path=path, dtype=torch.bfloat16)
    return _half_step(model, list(model.parameters()), ids)


def _lora_step(path: str, ids: Sequence[Tensor], rank: int) -> Callable[[], None]:
    """An optimizer step of adapters of ``peft`` on all linear layers, which compute in bfloat16 as the base does."""
    import peft

    config = peft.LoraConfig(r=rank, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    base: Any = build({}, packed=True, path=path, dtype=torch.bfloat16)
    adapted: Any = peft.get_peft_model(base, config, autocast_adapter_dtype=False)
    model = adapted.get_base_model()
    return _half_step(model, [p for p in model.parameters() if p.requires_grad], ids)


def _half_step(
    model: nn.Module, trained: Sequence[nn.Parameter], ids: Sequence[Tensor]
) -> Callable[[], None]:
    """The model computes with a bfloat16 copy of each float32 master.

    A gradient leaves for float32 as soon as it is there, so that no two copies of all of them exist.
    """
    pairs = [(half, nn.Parameter(half.detach().float())) for half in trained]
    for half, master in pairs:
        half.register_post_accumulate_grad_hook(partial(_hand_over, master))
    masters = [master for _, master in pairs]
    optimizer = torch.optim.AdamW(masters, lr=1e-4, weight_decay=0.01, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        _half_loss(model, model.lm_head.weight, ids).backward()
        nn.utils.clip_grad_norm_(masters, 1.0, foreach=True)
        optimizer.step()
        with torch.no_grad():
            for half, master in pairs:
                half.copy_(master)

    return step


def _hand_over(master: nn.Parameter, half: Tensor) -> None:
    assert half.grad is not None
    master.grad = half.grad.float()
    half.grad = None


def _half_loss(model: nn.Module, head: Tensor, ids: Sequence[Tensor]) -> Tensor:
    """Mean negative log-prob of all tokens but the first of each sequence."""
    bounds = [0, *accumulate(map(len, ids))]
    packed, positions = torch.cat(list(ids)), torch.cat([torch.arange(len(row)) for row in ids])
    hidden = model.model(
        input_ids=packed[None],
        position_ids=positions[None],
        attention_mask=None,
        use_cache=False,
        bounds=bounds,
    ).last_hidden_state[0]
    predicted = positions.nonzero().squeeze(1)
    states, targets = hidden[predicted - 1], packed[predicted]
    total = states.new_zeros((), dtype=torch.float32)
    for chunk, labels in zip(states.split(CHUNK), targets.split(CHUNK), strict=True):
        total = total + checkpoint(_chunk_loss, chunk, head, labels, use_reentrant=False)
    return total / len(predicted)


def _chunk_loss(states: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(states, head).float(), targets, reduction="sum")


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
    "by hand": partial(_by_hand, _full_step),
    "engine, LoRA": partial(_engine, lora={"rank": LORA_RANK}),
    "by hand, LoRA": partial(_by_hand, partial(_lora_step, rank=LORA_RANK)),
}


def steps_of(side: str, path: str, count: int) -> list[Cost]:
    """``count`` steps of ``side`` after another one, in a fresh process with one thread."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_take, args=(sender, side, path, 1 + count))
    process.start()
    sender.close()
    costs: list[Cost] = receiver.recv()
    process.join()
    return costs[1:]


def _take(connection: Connection, side: str, path: str, count: int) -> None:
    torch.set_num_threads(1)
    step = SIDES[side](path, make_batch(LENGTHS, AutoConfig.from_pretrained(path).vocab_size))
    connection.send([_cost(step) for _ in range(count)])


def _cost(step: Callable[[], object]) -> Cost:
    _forget_peak()
    cpu, wall = time.process_time(), time.perf_counter()
    step()
    return Cost(time.process_time() - cpu, time.perf_counter() - wall, _peak())


def _peak() -> int:
    """The resident set at its highest since `_forget_peak`, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024


def _forget_peak() -> None:
    """Begin ``VmHWM`` anew."""
    Path("/proc/self/clear_refs").write_text("5")
