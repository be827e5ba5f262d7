"""A digest of tensors that does not depend on how they are sharded."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor

from core_rl.distributed.comm import Comm

__all__ = ["digest_of_parts"]


def digest_of_parts(world: Comm, parts: Iterable[tuple[str, Tensor]]) -> str:
    """A digest of float tensors, of which the ranks hold ``parts``, each element on one of them; collective.

    It is made from the sum of each tensor's bits as integers, so nothing is gathered. It tells trained
    weights from others; a permutation within a tensor keeps it.
    """
    own = {name: int(_bits(part).sum(dtype=torch.int64)) for name, part in parts}
    totals: Counter[str] = Counter()
    for sums in world.gather(own):
        totals.update(sums)
    return hashlib.sha256(json.dumps(sorted(totals.items())).encode()).hexdigest()[:32]


def _bits(part: Tensor) -> Tensor:
    return part.detach().float().contiguous().view(torch.int32)
