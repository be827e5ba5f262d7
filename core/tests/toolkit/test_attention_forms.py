"""Packed attention: sinks and values of another width, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from core_rl.errors import UnsupportedCapability
from core_rl.toolkit import segments as segments_module
from core_rl.toolkit.attention import packed_attention
from core_rl.toolkit.segments import Segments

SEGMENTS = Segments((0, 4, 11))
HEADS, KV_HEADS, WIDTH, VALUE_WIDTH = 4, 2, 6, 3


def inputs() -> tuple[Tensor, ...]:
    """Query, key, value and sinks, float64."""
    torch.manual_seed(0)
    shapes = (1, HEADS, 11, WIDTH), (1, KV_HEADS, 11, WIDTH), (1, KV_HEADS, 11, VALUE_WIDTH), (HEADS,)
    return tuple(torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)


def explicit(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, window: int | None) -> Tensor:
    """One query and one head at a time: softmax over the visible keys and the sink, whose value is 0."""
    rows = []
    for start, end in ((0, 4), (4, 11)):
        for t in range(start, end):
            first = start if window is None else max(start, t - window + 1)
            for head in range(HEADS):
                local = head // (HEADS // KV_HEADS)
                scores = key[0, local, first : t + 1] @ query[0, head, t] * WIDTH**-0.5
                if sinks is not None:
                    scores = torch.cat([scores, sinks[head : head + 1]])
                weights = scores.softmax(0)[: t + 1 - first]
                rows.append(weights @ value[0, local, first : t + 1])
    return torch.stack(rows).view(1, 11, HEADS, VALUE_WIDTH)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("with_sinks", [True, False])
def test_sinks_and_windows_match_explicit_softmax(with_sinks: bool, window: int | None) -> None:
    query, key, value, sinks = inputs()
    s_aux = sinks if with_sinks else None
    actual, _ = packed_attention(
        nn.Module(), query, key, value, None, segments=SEGMENTS, sliding_window=window, s_aux=s_aux
    )
    expected = explicit(query, key, value, s_aux, window)
    torch.testing.assert_close(actual, expected)
    leaves = [query, key, value, *([sinks] if with_sinks else [])]
    weights = torch.linspace(-1, 1, expected.numel(), dtype=torch.float64).view_as(expected)
    pairs = zip(
        torch.autograd.grad((actual * weights).sum(), leaves),
        torch.autograd.grad((expected * weights).sum(), leaves),
        strict=True,
    )
    for local, second in pairs:
        torch.testing.assert_close(local, second)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"attention_mask": torch.zeros(1, 1, 11, 11)}, "a mask of its own"),
        ({"is_causal": False}, "attention in both directions"),
        ({"position_bias": torch.zeros(1)}, "'position_bias'"),
        ({"segments": None}, "gets no 'segments'"),
    ],
)
def test_unsupported_attention_is_refused(keywords: dict[str, Any], message: str) -> None:
    query, key, value, _ = inputs()
    arguments = {"attention_mask": None, "segments": SEGMENTS, **keywords}
    with pytest.raises(UnsupportedCapability, match=message):
        packed_attention(nn.Module(), query, key, value, **arguments)


TREE = ((0,), (0, 1), (0, 2), (0, 3), (0, 3, 4), (0, 3, 5))


@pytest.mark.parametrize("paths", [None, TREE])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 3}, {"softcap": 2.0}, {"s_aux": True}])
def test_equal_shapes_share_calls(
    paths: tuple[tuple[int, ...], ...] | None, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    query, key, value, sinks = inputs()
    segments = Segments((0, 3, 5, 7, 9, 10, 11), paths=paths)
    if "s_aux" in options:
        options = {"s_aux": sinks}
    results = []
    for scores in (1, 8, segments_module.SCORES_AT_ONCE):  # one, some, and all of equal shape in a call
        monkeypatch.setattr(segments_module, "SCORES_AT_ONCE", scores)
        attended, _ = packed_attention(nn.Module(), query, key, value, None, segments=segments, **options)
        results.append((attended, *torch.autograd.grad(attended.square().sum(), [query, key, value])))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0])
