"""`MegatronRngState`: the states of Megatron's random number tracker, as one engine left them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, initialize_rng_tracker
from torch import Tensor

__all__ = ["MegatronRngState"]


class MegatronRngState:
    """States of the tracker by name, uint8. A process has one tracker, and each engine swaps its states in.

    Tensor parallel ranks drop different elements of what they share out, and the same ones of what each has whole.
    """

    def __init__(self, seed: int) -> None:
        # Offsets as in Megatron's model_parallel_cuda_manual_seed, which would also seed the global generator.
        own = seed + 2718 + mpu.get_tensor_model_parallel_rank()
        initialize_rng_tracker()
        tracker = get_cuda_rng_tracker()
        tracker.reset()
        tracker.add("data-parallel-rng", seed)
        tracker.add("model-parallel-rng", own)
        tracker.add("expert-parallel-rng", own + 1024 + 100 * mpu.get_expert_model_parallel_rank())
        self.states: dict[str, Tensor] = tracker.get_states()

    def load(self, states: Mapping[str, Tensor]) -> None:
        """Set those of ``states`` that this engine has."""
        self.states |= {name: states[name] for name in self.states if name in states}

    @contextmanager
    def own(self) -> Iterator[None]:
        """The engine's states inside the context; they continue where the last one ended."""
        tracker = get_cuda_rng_tracker()
        tracker.set_states(self.states)
        try:
            yield
        finally:
            self.states = tracker.get_states()
