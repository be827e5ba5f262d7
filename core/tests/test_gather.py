"""Parts of tensors that do not make up a whole are refused before anything is exported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from core_rl.distributed.comm import Comm
from core_rl.errors import EngineContractError
from core_rl.state.gather import LocalPart, ShardGather


@dataclass(frozen=True)
class Told(Comm):
    """A world whose other rank holds ``other``."""

    other: Any = None

    def gather(self, value: Any) -> list[Any]:
        return [value, self.other]


def part(rows: int, start: int) -> LocalPart:
    return LocalPart(torch.zeros(rows, 2), (start, 0))


@pytest.mark.parametrize(
    ("own", "other"),
    [
        (part(3, 0), part(2, 3)),
        (part(5, 0), part(5, 0)),
        (part(5, 0), part(0, 5)),
    ],
    ids=["halves", "copies", "all-on-one"],
)
def test_parts_that_make_up_a_tensor_are_taken(own: LocalPart, other: LocalPart) -> None:
    ShardGather(Told(other={"w": other.region}), {"w": own}, {"w": (5, 2)})


@pytest.mark.parametrize(
    ("own", "other", "problem"),
    [
        (part(3, 0), part(1, 3), "8 of 10 elements"),
        (part(3, 0), part(3, 2), "12 of 10 elements"),
        (part(3, 0), part(2, 4), "10 of 10 elements"),
    ],
    ids=["hole", "overlap", "outside"],
)
def test_parts_that_do_not_are_refused(own: LocalPart, other: LocalPart, problem: str) -> None:
    with pytest.raises(EngineContractError, match=problem):
        ShardGather(Told(other={"w": other.region}), {"w": own}, {"w": (5, 2)})
