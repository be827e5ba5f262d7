"""Log-probs of drawn tokens under the full distribution, at every temperature."""

from __future__ import annotations

import math
from functools import wraps
from typing import Any

from torch import Tensor
from vllm import sampling_params
from vllm.v1.sample.sampler import Sampler

HIGHEST = 2.0
"""The highest temperature that vLLM takes."""


def report_full_distribution() -> None:
    """Have ``processed_logprobs`` be those of the tempered logits, before top-k, top-p and min-p cut them."""
    original = Sampler.sample
    if hasattr(original, "__wrapped__"):
        return

    @wraps(original)
    def sample(
        self: Any, logits: Tensor, metadata: Any, logprobs_mode_override: str | None = None
    ) -> tuple[Tensor, Tensor | None]:
        mode = logprobs_mode_override or self.logprobs_mode
        if mode != "processed_logprobs" or metadata.all_greedy:
            found: tuple[Tensor, Tensor | None] = original(self, logits, metadata, logprobs_mode_override)
            return found
        # Both steps may write into their argument.
        tempered = self.apply_temperature(logits.clone(), metadata.temperature, metadata.all_random)
        full = self.compute_logprobs(tempered)
        sampled, reported = original(self, logits, metadata, logprobs_mode_override)
        return sampled, None if reported is None else full

    Sampler.sample = sample


def take_every_temperature() -> None:
    """Draw at the temperature of the request: vLLM refuses more than 2, and replaces less than 0.01."""
    parameters = sampling_params.SamplingParams
    original = parameters._verify_args
    if hasattr(original, "__wrapped__"):
        return

    @wraps(original)
    def verify(self: Any) -> None:
        temperature = self.temperature
        if HIGHEST < temperature < math.inf:
            self.temperature = HIGHEST
        try:
            original(self)
        finally:
            self.temperature = temperature

    parameters._verify_args = verify
    sampling_params._MAX_TEMP = 0.0  # the lowest, whatever its name says
