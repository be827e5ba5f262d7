"""`Draws`: the random numbers of one engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["Draws"]


class Draws:
    """The states of torch's own generators, of the CPU and of ``device``, as one engine left them.

    Engines of one process draw from the same generators, and so does the program around them. Each engine finds
    its own states there while its hooks run, and leaves those of the others as they were: dropout depends on the
    engine's seed and on what it has computed, and on nothing else.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._cuda = device if device.type == "cuda" else None
        places = [torch.device("cpu"), *([device] if self._cuda is not None else [])]
        self._states = [torch.Generator(place).manual_seed(seed).get_state() for place in places]
        self._inside = False

    @contextmanager
    def own(self) -> Iterator[None]:
        """The engine's states inside the context; they go on where the last one ended."""
        if self._inside:
            yield
            return
        others = self._get()
        self._set(self._states)
        self._inside = True
        try:
            yield
        finally:
            self._inside = False
            self._states = self._get()
            self._set(others)

    def _get(self) -> list[Tensor]:
        states = [torch.get_rng_state()]
        return states if self._cuda is None else [*states, torch.cuda.get_rng_state(self._cuda)]

    def _set(self, states: list[Tensor]) -> None:
        torch.set_rng_state(states[0])
        if self._cuda is not None:
            torch.cuda.set_rng_state(states[1], self._cuda)
