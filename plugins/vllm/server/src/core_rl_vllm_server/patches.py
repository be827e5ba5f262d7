"""Changes of vLLM: log-probs of the full distribution at every temperature, and tied heads on CPUs."""

from __future__ import annotations

import math
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from vllm import sampling_params
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.platforms import current_platform
from vllm.v1.sample.sampler import Sampler

HIGHEST = 2.0
"""The highest temperature that vLLM takes."""
TIED = "core_rl_tied"
"""The mark of a head that shares the embedding's weights."""


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


def keep_tied_heads_current() -> None:
    """Have tied heads multiply by the embedding's weights, and not by a copy of them.

    On CPUs vLLM packs the weights of each head when they are loaded, and multiplies by the packed copy. A later update
    brings those of the embedding alone, and a tied head would keep the copy of the weights before.
    """
    method = UnquantizedEmbeddingMethod
    tie, process = method.tie_weights, method.process_weights_after_loading
    if hasattr(tie, "__wrapped__"):
        return

    @wraps(tie)
    def tie_weights(self: Any, layer: torch.nn.Module, embed_tokens: torch.nn.Module) -> Any:
        setattr(layer, TIED, True)
        return tie(self, layer, embed_tokens)

    @wraps(process)
    def process_weights_after_loading(self: Any, layer: Any) -> None:
        if current_platform.is_cpu() and getattr(layer, TIED, False):
            layer.cpu_linear = torch.nn.functional.linear
        else:
            process(self, layer)

    method.tie_weights = tie_weights
    method.process_weights_after_loading = process_weights_after_loading
