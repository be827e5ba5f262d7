"""Arguments of packed attention for CUDA's kernels, checked by a stand-in on the CPU."""

from __future__ import annotations

import importlib.util
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core_rl.errors import MissingPackage
from core_rl.toolkit.attention import packed_attention
from core_rl.toolkit.cuda import use_flash_attention
from core_rl.toolkit.segments import Segments

BOUNDS = (0, 4, 11, 12)
PATHS = ((0,), (0, 1), (0, 1, 2))
HEADS, KV_HEADS = 4, 2


def insisting_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    starts_of_keys: Tensor,
    longest: int,
    longest_of_keys: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """Attention of packed sequences as `torch.nn.attention.varlen.varlen_attn`, which raises where that one would."""
    assert query.shape[-1] == key.shape[-1] == value.shape[-1]
    assert query.shape[-1] % 8 == 0
    assert query.shape[-1] <= 256
    assert query.dtype in (torch.float16, torch.bfloat16)
    assert all(part.is_contiguous() for part in (query, key, value))
    assert starts.dtype == torch.int32
    assert starts_of_keys.dtype == torch.int32
    bounds, key_bounds = list(pairwise(starts.tolist())), list(pairwise(starts_of_keys.tolist()))
    assert longest == max(end - start for start, end in bounds)
    assert longest_of_keys == max(end - start for start, end in key_bounds)
    assert scale is not None, "padded head dimensions would change the default"
    assert enable_gqa == (query.shape[1] != key.shape[1])
    before, after = window_size
    assert after == 0
    rows = []
    for (start, end), (key_start, key_end) in zip(bounds, key_bounds, strict=True):
        # The last query is at the last key, as FlashAttention has it from 2.1 on.
        first = key_end - key_start - (end - start)
        distance = torch.arange(first, key_end - key_start)[:, None] - torch.arange(key_end - key_start)
        mask = (distance >= 0) & ((distance <= before) if before >= 0 else torch.tensor(True))
        q = query[start:end].transpose(0, 1)
        k, v = (part[key_start:key_end].transpose(0, 1) for part in (key, value))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)
        rows.append(attended.transpose(0, 1))
    return torch.cat(rows)


def inputs(dtype: torch.dtype, width: int, value_width: int) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = (HEADS, width), (KV_HEADS, width), (KV_HEADS, value_width)
    return [torch.randn(1, heads, BOUNDS[-1], size).to(dtype).requires_grad_() for heads, size in shapes]


def attend(
    parts: list[Tensor], window: int | None, paths: tuple[tuple[int, ...], ...] | None = None
) -> Tensor:
    query, key, value = parts
    segments = Segments(BOUNDS, paths=paths)
    actual, _ = packed_attention(
        nn.Module(), query, key, value, None, segments=segments, sliding_window=window
    )
    return actual


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the CPU are taken for tensors of a GPU."""
    monkeypatch.setattr("core_rl.toolkit.cuda.on_cuda", lambda tensor: True)


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize("paths", [None, PATHS])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(("width", "value_width"), [(10, 10), (6, 3), (64, 64), (192, 128)])
def test_varlen_kernel_gets_supported_arguments(
    width: int,
    value_width: int,
    window: int | None,
    paths: tuple[tuple[int, ...], ...] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts = inputs(torch.bfloat16, width, value_width)
    exact = [part.detach().double().requires_grad_() for part in parts]
    expected = attend(exact, window, paths)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", insisting_kernel)
    actual = attend(parts, window, paths)
    weights = torch.linspace(-1, 1, expected.numel()).view_as(expected)
    gradients = torch.autograd.grad((actual.double() * weights).sum(), parts)
    expected_gradients = torch.autograd.grad((expected * weights).sum(), exact)
    for local, second in zip([actual, *gradients], [expected, *expected_gradients], strict=True):
        torch.testing.assert_close(
            local.double(), second, rtol=0.05, atol=0.02 * float(second.detach().abs().max())
        )


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize("setting", [{"softcap": 30.0}, {"dropout": 0.5}, {"s_aux": torch.zeros(HEADS)}])
def test_unsupported_attention_bypasses_the_kernel(
    setting: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("torch.nn.attention.varlen.varlen_attn")
    query, key, value = inputs(torch.bfloat16, 8, 8)
    packed_attention(nn.Module(), query, key, value, None, segments=Segments(BOUNDS), **setting)


@pytest.mark.usefixtures("on_cuda")
def test_wide_heads_bypass_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torch.nn.attention.varlen.varlen_attn")
    attend(inputs(torch.bfloat16, 264, 264), None)


@pytest.mark.usefixtures("on_cuda")
def test_float32_avoids_kernel_with_all_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA, float32 with fewer heads of keys than of queries is served by no other."""
    parts = inputs(torch.float32, 6, 6)
    plain = attend([part.double() for part in parts], 3)
    original, calls = F.scaled_dot_product_attention, []

    def watched(query: Tensor, key: Tensor, value: Tensor, **settings: Any) -> Tensor:
        calls.append((query.shape[1] == key.shape[1] == value.shape[1], settings["enable_gqa"]))
        return original(query, key, value, **settings)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    actual = attend(parts, 3)
    assert calls == [(True, False)] * (len(BOUNDS) - 1)
    torch.testing.assert_close(actual.double(), plain, rtol=1e-5, atol=1e-6)


def test_flash_attention_3_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[str] = []
    monkeypatch.setattr("core_rl.toolkit.cuda.activate_flash_attention_impl", requested.append)
    use_flash_attention(2)
    use_flash_attention(3)
    assert requested == ["FA3"], "torch's own needs nothing"


def test_missing_flash_attention_3_is_refused() -> None:
    if importlib.util.find_spec("flash_attn_interface") is not None:
        pytest.skip("it is installed here")
    with pytest.raises(MissingPackage, match=r"torch cannot use FlashAttention 3 .*, or choose version 2"):
        use_flash_attention(3)


def test_bounds_are_copied_once_for_all_layers() -> None:
    segments = Segments(BOUNDS)
    first = segments.starts(torch.device("meta"))
    assert first is segments.starts(torch.device("meta"))
    assert (first.dtype, first.shape) == (torch.int32, (len(BOUNDS),))
