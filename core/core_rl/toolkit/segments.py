"""Sequences of a packed batch for the layers that must not mix them, and stretches of equal shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from core_rl.data.order import token_index
from core_rl.data.pinned import to_device
from core_rl.distributed.comm import Comm

__all__ = ["Blocks", "KernelCall", "Segments"]

SCORES_AT_ONCE = 2**14
"""Scores of each head in a call of a kernel for several sequences of equal shape: with more, copies cost more time than
calls on a CPU."""

Blocks = tuple[tuple[int, int], ...]
"""Stretches ``start, end`` of a sequence."""


@dataclass(frozen=True)
class KernelCall:
    """Stretches of equal shape in one call of a kernel: where they are short, calls cost more than tokens."""

    count: int
    """Stretches."""
    length: int
    """Tokens of each stretch."""
    queries: int
    """Tokens whose queries are computed for each stretch, its own last."""
    visible: int
    """Tokens that each stretch sees, its own last."""
    blocks: Blocks


@dataclass(frozen=True)
class KernelCalls:
    """The calls for all stretches, and the rows of the batch in their order."""

    calls: list[KernelCall]
    queries: Tensor | None
    """Rows whose queries are computed, int64; None for all in their order, as below."""
    keys: Tensor | None
    """Rows of the keys and values, int64."""
    places: Tensor | None
    """The place of each row of the batch in the result of all calls, int64 ``[T]``."""


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
        self._calls: dict[tuple[int, torch.device], KernelCalls] = {}

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of each sequence or stretch."""
        return [end - start for start, end in pairwise(self.bounds)]

    @cached_property
    def visible(self) -> list[int]:
        """Tokens that each sequence or stretch sees, its own included."""
        lengths = self.lengths
        return lengths if self.paths is None else [sum(map(lengths.__getitem__, path)) for path in self.paths]

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest sequence, or of the longest path."""
        return max(self.visible)

    def starts(self, device: torch.device) -> Tensor:
        """``bounds`` on ``device``, int32 ``[B + 1]``: copied once, for all layers and for blocks that are computed
        again. Models ask for it before their blocks, in which no copy should break the queue of an accelerator.
        """
        return self._copied("starts", device, lambda: torch.tensor(self.bounds, dtype=torch.int32))

    def seen(self, device: torch.device) -> Tensor | None:
        """The rows of all paths in turn, int64; None where all are sequences."""
        if self.paths is None:
            return None
        flat = [stretch for path in self.paths for stretch in path]
        bounds = torch.tensor(self.bounds)
        return self._copied("seen", device, lambda: token_index(bounds, torch.tensor(flat)))

    def visible_starts(self, device: torch.device) -> Tensor:
        """Bounds of the paths in `seen`, int32 ``[B + 1]``; without paths, `starts`."""
        if self.paths is None:
            return self.starts(device)
        return self._copied(
            "visible_starts", device, lambda: torch.tensor([0, *accumulate(self.visible)], dtype=torch.int32)
        )

    def prepare(self, device: torch.device) -> None:
        """Copy to an accelerator before the blocks."""
        if device.type == "cpu":
            return
        self.starts(device)
        self.seen(device)
        self.visible_starts(device)

    def _copied(self, name: str, device: torch.device, compute: Callable[[], Tensor]) -> Tensor:
        if (name, device) not in self._copies:
            self._copies[name, device] = to_device(compute(), device)
        return self._copies[name, device]

    def kernel_calls(self, widest_square: int, device: torch.device) -> KernelCalls:
        """All stretches, or sequences, by their shapes; found once for all layers.

        Up to ``widest_square`` visible tokens, a stretch that is longer than those before it is computed with its path.
        """
        if (widest_square, device) not in self._calls:
            self._calls[widest_square, device] = self._grouped(widest_square, device)
        return self._calls[widest_square, device]

    def _grouped(self, widest_square: int, device: torch.device) -> KernelCalls:
        lengths = self.lengths
        paths = self.paths or [(sequence,) for sequence in range(len(lengths))]
        groups: dict[tuple[int, int, Blocks], list[int]] = {}
        for stretch in range(len(lengths)):
            blocks = self.blocks[stretch] if self.blocks else ()
            groups.setdefault((lengths[stretch], self.visible[stretch], blocks), []).append(stretch)
        calls, queries, keys, order = [], [], [], []
        for (length, visible, blocks), stretches in groups.items():
            # Causal kernels leave out half of a square, and no part of a masked rectangle.
            square = visible <= widest_square and 2 * length > visible
            at_once = max(1, SCORES_AT_ONCE // max(1, length * visible))
            for start in range(0, len(stretches), at_once):
                count = min(at_once, len(stretches) - start)
                calls.append(KernelCall(count, length, visible if square else length, visible, blocks))
            of_keys = [part for stretch in stretches for part in paths[stretch]]
            queries += of_keys if square else stretches
            keys += of_keys
            order += stretches
        bounds, in_order = torch.tensor(self.bounds), list(range(len(lengths)))
        rows = [
            None if stretches == in_order else token_index(bounds, torch.tensor(stretches))
            for stretches in (queries, keys, order)
        ]
        if rows[2] is not None:
            rows[2] = rows[2].argsort()
        return KernelCalls(calls, *(None if index is None else to_device(index, device) for index in rows))
