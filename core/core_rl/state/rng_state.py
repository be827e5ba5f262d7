"""`RngState`: the random number generators of one engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor


class RngState:
    """States of torch's own generators, of the CPU and of ``device``, as one engine left them.

    Engines of one process draw from the same generators, and so does the program around them. Each engine swaps its
    own states in around its passes and leaves the others' as they were: dropout depends on the engine's seed and its
    passes alone.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._device = device
        names = {"cpu": torch.device("cpu")} | ({"cuda": device} if device.type == "cuda" else {})
        self._states = {n: torch.Generator(d).manual_seed(seed).get_state() for n, d in names.items()}
        self._inside = False

    @contextmanager
    def own(self) -> Iterator[None]:
        """The engine's states inside the context; they continue where the last one ended."""
        if self._inside:
            yield
            return
        outer = self._get()
        self._set(self._states)
        self._inside = True
        try:
            yield
        finally:
            self._inside = False
            self._states = self._get()
            self._set(outer)

    def states(self) -> dict[str, Tensor]:
        """The states by device type, uint8."""
        return self._get() if self._inside else dict(self._states)

    def load(self, states: Mapping[str, Tensor]) -> None:
        """Set the states of the device types that ``states`` names."""
        loaded = {name: states[name] for name in self._states if name in states}
        self._states |= loaded
        if self._inside:
            self._set(self._states)

    def _get(self) -> dict[str, Tensor]:
        states = {"cpu": torch.get_rng_state()}
        if self._device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state(self._device)
        return states

    def _set(self, states: Mapping[str, Tensor]) -> None:
        torch.set_rng_state(states["cpu"])
        if "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"], self._device)
