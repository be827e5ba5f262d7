"""Sequences of a packed batch for the layers that must not mix them, and stretches of equal shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from core_rl.data.pinned import to_device
from core_rl.distributed.comm import Comm

__all__ = ["Blocks", "Segments", "ShapeGroup"]

SCORES_AT_ONCE = 2**14
"""Scores of each head in a call of a kernel for several sequences of equal shape: with more, copies cost more time than
calls on a CPU."""

Blocks = tuple[tuple[int, int], ...]
"""Stretches ``start, end`` of a sequence."""


@dataclass(frozen=True)
class ShapeGroup:
    """Stretches of equal shape, which share calls of a kernel: where they are short, calls cost more than tokens."""

    stretches: list[int]
    length: int
    """Tokens of each stretch."""
    queries: list[tuple[int, ...]]
    """For each stretch, the stretches whose queries are computed, itself last."""
    paths: list[tuple[int, ...]]
    """For each stretch, the stretches that it sees, itself last."""
    blocks: Blocks
    at_once: int
    """Stretches of a call."""


class Segments:
    """Bounds of the sequences of a packed batch, or of the stretches of a `PrefixTree`.

    An object, so that compiled code does not depend on their number. No dataclass: FSDP looks for tensors in all fields
    of these, for each block.
    """

    def __init__(
        self,
        bounds: tuple[int, ...],
        context: Comm | None = None,
        tensor: Comm | None = None,
        paths: tuple[tuple[int, ...], ...] | None = None,
        blocks: tuple[Blocks, ...] = (),
    ) -> None:
        self.bounds = bounds
        """``cu_seqlens`` of the whole batch as ``B + 1`` integers, or the bounds of stretches."""
        self.context = context
        """The ranks over which the tokens of the batch are spread, if they are."""
        self.tensor = tensor
        """The ranks over which the heads are spread, if they are; all else that is random is the same on them."""
        self.paths = paths
        """For each stretch of a tree, the stretches whose tokens it sees, itself last; None where all are sequences."""
        self.blocks = blocks
        """For each sequence, its stretches ``start, end`` of tokens that see each other in both directions; empty
        without any."""
        self._copies: dict[tuple[str, torch.device], Tensor] = {}
        self._groups: dict[int, list[ShapeGroup]] = {}

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of each sequence or stretch."""
        return [end - start for start, end in pairwise(self.bounds)]

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest sequence, or of the longest path."""
        if self.paths is None:
            return max(self.lengths)
        return max(sum(self.lengths[part] for part in path) for path in self.paths)

    def starts(self, device: torch.device) -> Tensor:
        """``bounds`` on ``device``, int32 ``[B + 1]``: copied once, for all layers and for blocks that are computed
        again. Models ask for it before their blocks, in which no copy should break the queue of an accelerator.
        """
        return self._copied("starts", device, lambda: torch.tensor(self.bounds, dtype=torch.int32))

    def seen(self, device: torch.device) -> Tensor | None:
        """The rows of all paths in turn, int64; None where all are sequences."""
        if self.paths is None:
            return None
        rows = [torch.arange(start, end) for start, end in pairwise(self.bounds)]
        stretches = [rows[stretch] for path in self.paths for stretch in path]
        return self._copied("seen", device, lambda: torch.cat(stretches))

    def visible_starts(self, device: torch.device) -> Tensor:
        """Bounds of the paths in `seen`, int32 ``[B + 1]``; without paths, `starts`."""
        if self.paths is None:
            return self.starts(device)
        lengths = [sum(self.lengths[part] for part in path) for path in self.paths]
        return self._copied(
            "visible_starts", device, lambda: torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        )

    def prepare(self, device: torch.device) -> None:
        """Copy to ``device`` before the blocks."""
        self.starts(device)
        self.seen(device)
        self.visible_starts(device)

    def _copied(self, name: str, device: torch.device, compute: Callable[[], Tensor]) -> Tensor:
        if (name, device) not in self._copies:
            self._copies[name, device] = to_device(compute(), device)
        return self._copies[name, device]

    def shape_groups(self, widest_square: int) -> list[ShapeGroup]:
        """All stretches, or sequences, by their shapes; found once for all layers.

        Up to ``widest_square`` visible tokens, a stretch that is longer than those before it is computed with its path.
        """
        if widest_square in self._groups:
            return self._groups[widest_square]
        lengths = self.lengths
        paths = self.paths or [(sequence,) for sequence in range(len(lengths))]
        groups: dict[tuple[int, int, Blocks], ShapeGroup] = {}
        for stretch, path in enumerate(paths):
            length, visible = lengths[stretch], sum(lengths[part] for part in path)
            blocks = self.blocks[stretch] if self.blocks else ()
            # Causal kernels leave out half of a square, and no part of a masked rectangle.
            square = visible <= widest_square and 2 * length > visible
            group = groups.setdefault(
                (length, visible, blocks),
                ShapeGroup([], length, [], [], blocks, max(1, SCORES_AT_ONCE // max(1, length * visible))),
            )
            group.stretches.append(stretch)
            group.queries.append(path if square else path[-1:])
            group.paths.append(path)
        return self._groups.setdefault(widest_square, list(groups.values()))
