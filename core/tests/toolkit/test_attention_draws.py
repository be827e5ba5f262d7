"""Dropout of attention weights where the ranks of a tensor parallel group have different heads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from core_rl.distributed.comm import Comm
from core_rl.toolkit.attention import packed_attention
from core_rl.toolkit.segments import Segments

HEADS = 64


@dataclass(frozen=True)
class OneOfTwo(Comm):
    """A rank of two, without the other."""

    number: int = 0

    @property
    def rank(self) -> int:
        return self.number

    @property
    def size(self) -> int:
        return 2


def kept(rank: int) -> tuple[Tensor, Tensor]:
    """The heads of one token that dropout keeps on ``rank``, and the next number that this rank draws."""
    torch.manual_seed(0)
    ones = torch.ones(1, HEADS, 1, 2)
    segments = Segments((0, 1), tensor=OneOfTwo(number=rank))
    out, _ = packed_attention(nn.Module(), ones, ones, ones, None, segments=segments, dropout=0.5)
    return out[0, 0, :, 0] != 0, torch.rand(())


def test_tensor_parallel_ranks_drop_different_heads() -> None:
    (first, after_first), (second, after_second) = kept(0), kept(1)
    assert not first.equal(second)
    assert after_first == after_second
    assert kept(1)[0].equal(second), "a pass that is recomputed drops the same"
