"""Estimate of the memory of a rank, in bytes.

 Micro-batches have ``T`` tokens; the model has ``L`` layers of width ``h``;
the compute dtype has ``b`` bytes:

=========== ============================================================================================
weights     the engine config's `TrainEngineConfig.state_bytes`: as a rule 4 for each weight on
gradients   the ranks that share a copy, the same for a gradient, and 8 for AdamW's moments
moments
transient   one float32 gradient of the head or the embeddings before it is added to others, and what an engine
            gathers (`TrainEngineConfig.gathered_bytes`)
activations ``b T / cp * (6 h + (3 q + 2 k + 4 f) / tp)`` for each layer, with queries of width ``q``, keys and
            values of ``k`` and an MLP of ``f``: counted as Korthikanti et al. 2022 (arXiv:2205.05198, section 4)
            do, for RMSNorm, a gated MLP and no attention matrix, which is not kept; in bfloat16 ``8 h`` for
            ``6 h``, since norms keep float32. Norms of queries and keys add ``2 (q + k)``, in bfloat16 ``3 (q + k)``.
            Sequence parallelism spreads all of it over ``tp``. One layer where nothing is trained. Where layers are
            computed again, ``b h T`` for each and one layer in full. Under pipeline parallelism, ``pp``
            micro-batches on the first stage make up for its fewer layers (4.2.3).
logits      log-probs are computed in chunks of rows, in two float32 buffers; logits that fit into 128 MiB are
            kept besides (`core_rl.toolkit.token_logprobs`)
=========== ============================================================================================

It leaves out what frameworks and libraries take, buffers of communication, and fragmentation. Of expert parallelism it
knows what is gathered and kept of routed tokens (`TrainEngineConfig.expert_rows`), not that weights are shared.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from core_rl.config.engine import TrainEngineConfig
from core_rl.toolkit.footprint import Footprint
from core_rl.toolkit.token_logprobs import GROUP_ROWS, KEEP_BYTES, chunk_rows

__all__ = ["BYTES", "MemoryEstimate", "estimate_memory"]

BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes on one rank; see the module's docstring."""

    weights: float
    gradients: float = 0.0
    moments: float = 0.0
    transient: float = 0.0
    activations: float = 0.0
    logits: float = 0.0

    @property
    def total(self) -> float:
        """The most at one time: in a backward pass, or in the optimizer's step, which takes half the moments again."""
        state = self.weights + self.gradients + self.moments
        return state + max(self.transient + self.activations + self.logits, self.moments / 2)


def estimate_memory(config: TrainEngineConfig, model: Footprint, tokens: int) -> MemoryEstimate:
    """The memory of one rank for micro-batches of ``tokens``; see the module's docstring."""
    state = config.state_bytes(model.parameters, 0 if config.optimizer is None else model.trained)
    return MemoryEstimate(
        weights=state.weights,
        gradients=state.gradients,
        moments=state.moments,
        transient=_transient(config, model),
        activations=_activations(config, model, tokens),
        logits=_logits(config, model, tokens),
    )


def _transient(config: TrainEngineConfig, model: Footprint) -> float:
    gradient = 4 * model.largest / config.layout.tp if config.optimizer is not None else 0.0
    # A rank gathers its own experts alone.
    present = model.parameters - model.experts + model.experts // config.layout.ep
    return gradient + config.gathered_bytes(present, model.outer, model.layers)


def _activations(config: TrainEngineConfig, model: Footprint, tokens: int) -> float:
    layout, size = config.layout, BYTES[config.dtype] * tokens / config.layout.cp
    # Input and output of a norm, in bfloat16 with a float32 copy of the input.
    norm = 4 if config.dtype == "bfloat16" else 3
    around = 2 * norm * model.hidden / (layout.tp if layout.sequence_parallel else 1)
    inner = model.inner + (config.expert_rows - 1) * model.routed
    layer = size * (around + (inner + (norm - 1) * model.normed) / layout.tp)
    if config.optimizer is None:
        return layer
    if config.recomputes:
        return model.layers * size * model.hidden + layer
    return model.layers * layer


def _logits(config: TrainEngineConfig, model: Footprint, tokens: int) -> float:
    if config.model.head != "lm":
        return 0.0
    row = 4 * model.vocabulary / config.layout.tp
    local_tokens = tokens / config.layout.cp
    stored = local_tokens * row if local_tokens * row <= KEEP_BYTES and config.optimizer is not None else 0.0
    on_cpu = config.device == "cpu" or not torch.cuda.is_available()
    rows = chunk_rows(row, on_cpu)
    rounded = min(local_tokens, max(rows, GROUP_ROWS)) * row / 2  # gradients, for one product
    return stored + 2 * min(local_tokens, rows) * row + (rounded if config.dtype == "bfloat16" else 0.0)
