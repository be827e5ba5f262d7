"""verl's FSDP engine (fsdp2, one rank) on the CPU, with attention inside each packed sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import core_rl_verl.cpu  # noqa: F401  # registers a platform before verl is imported

# isort: split
import torch
from core_rl_verl.adapter import nested_batch
from tensordict import TensorDict
from torch import Tensor, nn
from transformers import AttentionInterface
from verl.models.transformers import monkey_patch
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.utils.losses import sft_loss

from common.bare import segment_attention


def verl_step(path: str, ids: Sequence[Tensor], *, budget: int) -> Callable[[], None]:
    """``train_batch`` of the engine over all ``ids`` in micro-batches of at most ``budget`` tokens."""
    AttentionInterface.register("bare_segments", segment_attention)
    # verl 0.9.1 looks in trl for a class that trl 1.16 has no more; only critics use it.
    monkey_patch.is_trl_available = lambda: False
    engine = FSDPEngineWithLMHead(
        HFModelConfig(
            path=path,
            load_tokenizer=False,
            enable_gradient_checkpointing=False,
            override_config={"attn_implementation": "bare_segments"},
        ),
        FSDPEngineConfig(
            strategy="fsdp2",
            mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
            use_torch_compile=False,
        ),
        FSDPOptimizerConfig(lr=1e-4, weight_decay=0.01, clip_grad=1.0, total_training_steps=10**6),
        CheckpointConfig(),
    )
    engine.initialize()
    engine.module.register_forward_pre_hook(with_bounds, with_kwargs=True)
    loss = partial(sft_loss, None)

    def step() -> None:
        with engine.train_mode():
            engine.train_batch(_batch(ids, budget), loss)

    return step


def with_bounds(_module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, Any]:
    """Tell the attention where sequences begin: the positions that are 0."""
    positions = keywords["position_ids"][0]
    bounds = [*(positions == 0).nonzero().flatten().tolist(), len(positions)]
    return arguments, keywords | {"bounds": bounds}


def _batch(ids: Sequence[Tensor], budget: int) -> TensorDict:
    trained = [torch.ones_like(row, dtype=torch.float32) for row in ids]
    for mask in trained:
        mask[0] = 0.0
    data = nested_batch(ids, {"loss_mask": trained})
    tensordict_utils.assign_non_tensor(
        data, temperature=1.0, max_token_len_per_gpu=budget, use_dynamic_bsz=True, use_remove_padding=True
    )
    return data
