"""bfloat16 training steps written by hand: float32 masters, fused AdamW, logits in chunks that are computed again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AutoModelForCausalLM

from common.bare import segment_attention

__all__ = ["full_step", "load_half", "lora_step"]

CHUNK = 128
"""Rows whose logits exist at one time."""


def load_half(path: str) -> nn.Module:
    """The plain transformers model in bfloat16, with attention inside each packed sequence."""
    AttentionInterface.register("bare_segments", segment_attention)
    model: nn.Module = AutoModelForCausalLM.from_pretrained(
        path, attn_implementation="bare_segments", dtype=torch.bfloat16
    )
    return model.train()


def full_step(path: str, ids: Sequence[Tensor]) -> Callable[[], None]:
    """An optimizer step of all weights."""
    model = load_half(path)
    return _step(model, list(model.parameters()), ids)


def lora_step(path: str, ids: Sequence[Tensor], rank: int) -> Callable[[], None]:
    """An optimizer step of adapters of ``peft`` on all linear layers, which compute in bfloat16 as the base does."""
    import peft

    config = peft.LoraConfig(r=rank, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted: Any = peft.get_peft_model(load_half(path), config, autocast_adapter_dtype=False)
    model = adapted.get_base_model()
    return _step(model, [p for p in model.parameters() if p.requires_grad], ids)


def _step(model: nn.Module, trained: Sequence[nn.Parameter], ids: Sequence[Tensor]) -> Callable[[], None]:
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
        _loss(model, model.lm_head.weight, ids).backward()
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


def _loss(model: nn.Module, head: Tensor, ids: Sequence[Tensor]) -> Tensor:
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
