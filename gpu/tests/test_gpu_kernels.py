"""Attention, log-probs, experts and the optimizer's step, next to float64 or to another way to compute them."""

from __future__ import annotations

from itertools import accumulate, product
from typing import Any

import pytest
import torch
from gpu_points import Figures, Setting
from torch import Tensor, nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from core_rl.toolkit.attention import packed_attention
from core_rl.toolkit.segments import Segments
from core_rl.toolkit.token_logprobs import token_logprobs

FACTOR = 4.0
"""An error may be so many times that of the plain computation in the same precision, as in the suite."""
FLOOR = 2.0**-9
"""Half a unit in the last place of bfloat16."""
HEADS, KV_HEADS = 8, 2
Paths = tuple[tuple[int, ...], ...]


@pytest.mark.gpu(limit_s=300)
def test_attention(setting: Setting) -> Figures:
    """Packed attention and its gradients against float64.

    Raises where results or gradients are further from float64 than the plain kernel's, times `FACTOR`.
    """
    lengths = setting.size([1, 17, 128, 1023, 8192], [1, 17, 40])
    worst: dict[str, float] = {}
    # Sequences, and stretches of a tree.
    trees = {
        "sequences": None,
        "shared prefixes": ((0,), (0, 1), (0, 1, 2), *((0, last) for last in range(3, len(lengths)))),
    }
    windows = (None, setting.size(512, 8))
    for width, window, (kind, paths) in product((64, 128, 256, 10), windows, trees.items()):
        errors = _attention_errors(setting, lengths, width, window, paths)
        worst[f"D {width}, window {window}, {kind}: error / allowed"] = max(errors)
    wrong = {name: error for name, error in worst.items() if error > 1.0}
    if wrong:
        raise RuntimeError(f"attention is wrong: {wrong}")
    return worst


def _attention_errors(
    setting: Setting, lengths: list[int], width: int, window: int | None, paths: Paths | None
) -> list[float]:
    torch.manual_seed(0)
    bounds = (0, *accumulate(lengths))
    shapes = [(1, heads, bounds[-1], width) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    exact = [torch.randn(shape).to(setting.dtype).to(setting.device) for shape in shapes]
    weights = torch.randn(1, bounds[-1], HEADS, width).to(setting.device)
    # A soft cap so high that it changes nothing makes the plain kernel compute.
    ways: list[dict[str, Any]] = [{}, {"softcap": 1e4}]
    segments = Segments(bounds, paths=paths)
    truth = _attended([part.double() for part in exact], segments, window, weights.double(), {"softcap": 1e9})
    ours, plain = (_attended(exact, segments, window, weights.to(setting.dtype), way) for way in ways)
    return [
        _distance(actual, expected) / (FACTOR * _distance(plain_error, expected) + FLOOR)
        for actual, plain_error, expected in zip(ours, plain, truth, strict=True)
    ]


def _attended(
    parts: list[Tensor], segments: Segments, window: int | None, weights: Tensor, way: dict[str, Any]
) -> list[Tensor]:
    """The result and the gradients of query, key and value."""
    leaves = [part.detach().requires_grad_() for part in parts]
    query, key, value = leaves
    out, _ = packed_attention(
        nn.Module(), query, key, value, None, segments=segments, sliding_window=window, **way
    )
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), leaves)]


def _distance(values: Tensor, expected: Tensor) -> float:
    return float((values.double() - expected).abs().max() / expected.abs().max())


@pytest.mark.gpu(limit_s=300)
def test_logprobs(setting: Setting) -> Figures:
    """Log-probs over a real vocabulary: error, time, memory.

    Raises where log-probs are further from float64 than the rounding of the logits' inputs explains.
    """
    vocabulary, hidden, tokens = setting.size((151_936, 4096, 32_768), (1000, 64, 256))
    torch.manual_seed(0)
    states = torch.randn(tokens, hidden, device=setting.device).to(setting.dtype).requires_grad_()
    weight = torch.randn(vocabulary, hidden, device=setting.device).mul_(hidden**-0.5).to(setting.dtype)
    weight.requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,), device=setting.device)
    with torch.no_grad():
        rows = slice(0, 64)
        logprobs, _ = token_logprobs(states[rows], weight, targets[rows])
        logits = states[rows].double() @ weight.double().T
        exact = logits.log_softmax(-1).gather(1, targets[rows, None]).squeeze(1)
        error = float((logprobs - exact).abs().max())
    # The CPU rounds the product itself to bfloat16; CUDA adds up in float32.
    allowed = setting.size(1e-4, 0.05)
    if error > allowed:
        raise RuntimeError(f"log-probs are off by {error:.3g} nats; at most {allowed:g} is explained")
    figures: dict[str, float | str] = {"error, nats": error}
    for chunk in setting.size((512, 2048, 4096), (64, 256)):

        def step(rows: int = chunk) -> None:
            logprobs, _ = token_logprobs(states, weight, targets, chunk=rows, keep_bytes=0)
            logprobs.sum().backward()

        figures[f"{chunk} rows: forward and backward, ms"] = setting.milliseconds(step)
        figures[f"{chunk} rows: peak, MiB"] = setting.peak_mib(step)
    return figures


@pytest.mark.gpu(limit_s=300)
def test_experts(setting: Setting) -> Figures:
    """A block of a mixture, its experts grouped and one by one.

    Raises where the two ways differ by more than rounding.
    """
    hidden, inner, count, tokens = setting.size((2048, 768, 128, 16_384), (64, 32, 8, 128))
    config = Qwen3MoeConfig(
        hidden_size=hidden,
        moe_intermediate_size=inner,
        num_experts=count,
        num_experts_per_tok=min(8, count),
        norm_topk_prob=True,
    )
    torch.manual_seed(0)
    states = torch.randn(1, tokens, hidden, device=setting.device, dtype=setting.dtype)
    figures: dict[str, float | str] = {}
    results = []
    for way in ("grouped_mm", "eager"):
        torch.manual_seed(0)
        config._experts_implementation = way
        block = Qwen3MoeSparseMoeBlock(config)
        for parameter in block.parameters():
            nn.init.normal_(parameter, std=0.02)
        block = block.to(setting.device, setting.dtype)

        def step(block: nn.Module = block) -> Tensor:
            output = block(states)
            out: Tensor = output[0] if isinstance(output, tuple) else output
            out.float().sum().backward()
            return out.detach()

        results.append(step().float())
        figures[f"{way}: forward and backward, ms"] = setting.milliseconds(step)
        figures[f"{way}: peak, MiB"] = setting.peak_mib(step)
    difference = float((results[0] - results[1]).abs().max() / results[1].abs().max())
    figures["largest difference, relative"] = difference
    if difference > 2.0**-5:
        raise RuntimeError(f"grouped and eager experts differ by {difference:.3g}")
    return figures


@pytest.mark.gpu(limit_s=300)
def test_adamw(setting: Setting) -> Figures:
    """AdamW fused and by operator.

    Raises where the two ways differ by more than some units in the last place.
    """
    count, size = setting.size((64, 2**24), (4, 2**10))
    figures: dict[str, float | str] = {"parameters": count * size}
    results = []
    for way in ("fused", "foreach"):
        torch.manual_seed(0)
        weights = [nn.Parameter(torch.randn(size, device=setting.device)) for _ in range(count)]
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        optimizer = torch.optim.AdamW(weights, lr=1e-3, fused=way == "fused", foreach=way == "foreach")
        optimizer.step()
        results.append(weights[0].detach().clone())
        figures[f"{way}: step, ms"] = setting.milliseconds(optimizer.step)
        figures[f"{way}: peak, MiB"] = setting.peak_mib(optimizer.step)
        del optimizer, weights
    difference = float((results[0] - results[1]).abs().max())
    figures["largest difference"] = difference
    if difference > 1e-6:
        raise RuntimeError(
            f"fused AdamW and that by operator differ by {difference:.3g} after a step of 1e-3"
        )
    return figures
