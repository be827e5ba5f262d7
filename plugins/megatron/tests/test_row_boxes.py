"""Boxes of flat ranges: every element once, at its position, as a view."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from core_rl_megatron.naming import FlatRange, RowBox

BOXES = (RowBox("q", 0, 3, (8, 0, 0)), RowBox("k", 3, 5, (0, 0, 0)))
RANGES = [(0, 24), (0, 4), (1, 3), (2, 9), (5, 20), (7, 8), (19, 24), (23, 24), (20, 24)]


@pytest.mark.parametrize(("start", "stop"), RANGES)
@pytest.mark.parametrize("columns", [(), (4,), (2, 2)], ids=["vector", "matrix", "kernel"])
def test_boxes_cover_a_range_once(start: int, stop: int, columns: tuple[int, ...]) -> None:
    """The last row of the parameter is padding, in no box."""
    shape = (6, *columns)
    values = torch.arange(24.0)[: torch.Size(shape).numel()]
    flat = FlatRange(values[start:stop].clone(), start)
    expected = {"q": values.view(shape)[:3], "k": values.view(shape)[3:5]}
    seen = 0
    for box in (replace(box, offsets=box.offsets[: len(shape)]) for box in BOXES):
        actual = list(box.cut(shape, flat))
        assert len(actual) <= 2 * len(shape) - 1
        for offsets, part in actual:
            local = [offset - first for offset, first in zip(offsets, box.offsets, strict=True)]
            region = tuple(slice(at, at + size) for at, size in zip(local, part.shape, strict=True))
            torch.testing.assert_close(part, expected[box.name][region], rtol=0, atol=0)
            assert part.untyped_storage().data_ptr() == flat.values.untyped_storage().data_ptr()
            seen += part.numel()
    padded = values.view(shape)[5:].numel()
    assert seen == max(0, min(stop, len(values) - padded) - start)
