"""Heads that share the weights of the embedding, on CPUs."""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.platforms import current_platform

TIED = "core_rl_tied"
"""The mark of a head that shares the embedding's weights."""


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
