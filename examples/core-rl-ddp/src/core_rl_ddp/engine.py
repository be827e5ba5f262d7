"""All weights on every rank, gradients added up once for each step."""

from __future__ import annotations

from core_rl.toolkit import (
    PACKED_ATTENTION,
    BuildContext,
    HFBackend,
    PackedModel,
    build_model,
    register_packed_attention,
)
from core_rl_ddp.config import DDPConfig


class DDPBackend(HFBackend[DDPConfig]):
    """Every rank has the whole model, and runs it on its own sequences."""

    def build(self, context: BuildContext[DDPConfig]) -> None:
        model_config = context.config.model
        register_packed_attention()
        # The seed is the same on all ranks, so they begin with the same weights.
        model = build_model(model_config, seed=context.seed, attn_implementation=PACKED_ATTENTION)
        self.packed = PackedModel(model, model_config.head).to(context.device)
        self.reduce_bytes = context.config.options.bucket_bytes
        self.adopt(model, context)
