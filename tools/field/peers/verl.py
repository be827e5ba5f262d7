"""verl's FSDP engines with removed padding, by `TrainingWorker`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import core_rl_verl.cpu  # noqa: F401  # registers a platform before verl is imported
import torch
import torch.distributed as dist
from core_rl_verl.adapter import nested_batch, worker_config
from tensordict import TensorDict
from torch import Tensor, nn
from transformers import AutoModelForTokenClassification
from verl.utils import tensordict_utils as tu
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithValueHead
from verl.workers.engine_workers import TrainingWorker

from core_rl.config.engine import DType
from field.models import Pictured
from field.peers.interface import NotRun, Peer, setup_of

EngineRegistry.register(model_type="value_model", backend=["fsdp2"], device=["cpu"])(FSDPEngineWithValueHead)


class VerlPeer(Peer):
    """`FSDPEngineWithLMHead`."""

    def open(self, model_dir: str, dtype: DType) -> None:
        self._worker = _worker("language_model", model_dir, dtype)

    @property
    def model(self) -> nn.Module:
        module: nn.Module = self._worker.engine.module
        return module

    def logprobs(self, sequences: Sequence[Tensor], temperature: float = 1.0) -> list[Tensor]:
        return _logprobs(self._worker, _data(sequences, temperature))

    def image_logprobs(self, model_dir: str, sequences: Sequence[Pictured]) -> list[Tensor]:
        worker = _worker("language_model", model_dir, "float32")
        data = _data([row.ids for row in sequences], 1.0)
        positions = [_positions(worker.engine.module.model, row) for row in sequences]
        data["position_ids"] = torch.nested.as_nested_tensor(positions, layout=torch.jagged)
        tu.assign_non_tensor(data, multi_modal_inputs=[dict(row.media) for row in sequences])
        return _logprobs(worker, data)

    def critic(self, model_dir: str, sequences: Sequence[Tensor], disable_dropout: bool) -> Tensor:
        if disable_dropout:
            raise NotRun("has no such setting")
        # verl loads critics with FlashAttention, which no CPU has.
        with patch("verl.utils.model.load_valuehead_model", _eager_value_model):
            engine = _worker("value_model", model_dir, "float32").engine
        seen: list[Tensor] = []
        for _ in range(2):
            with engine.train_mode():
                engine.forward_backward_batch(_data(sequences, 1.0), _values_to(seen.append))
        return torch.stack(seen)


def _logprobs(worker: TrainingWorker, data: TensorDict) -> list[Tensor]:
    with worker.engine.eval_mode():
        output = worker.engine.infer_batch(data, loss_function=None)
    # A log-prob stands at the token before it.
    return [row[:-1].detach() for row in output["model_output"]["log_probs"].unbind()]


def _positions(trunk: Any, row: Pictured) -> Tensor:
    """Positions ``[4, L]`` of text, time, height and width, as the agent loop of verl makes them."""
    kinds = (row.ids == trunk.config.image_token_id).int()
    positions = trunk.get_rope_index(
        row.ids[None], mm_token_type_ids=kinds[None], image_grid_thw=row.media["image_grid_thw"]
    )[0]
    return torch.cat([torch.arange(len(row.ids))[None], positions[:, 0]])


def _eager_value_model(
    local_path: str, torch_dtype: torch.dtype, model_config: Any, trust_remote_code: bool
) -> nn.Module:
    model: nn.Module = AutoModelForTokenClassification.from_pretrained(
        local_path, dtype=torch_dtype, config=model_config, attn_implementation="eager"
    )
    return model


def _values_to(take: Callable[[Tensor], object]) -> Callable[..., tuple[Tensor, dict[str, Any]]]:
    def loss(model_output: Any, data: TensorDict, dp_group: Any = None) -> tuple[Tensor, dict[str, Any]]:
        values = model_output["values"].values()
        take(values.detach().clone())
        return values.sum(), {}

    return loss


def _worker(model_type: str, model_dir: str, dtype: DType) -> TrainingWorker:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    worker = TrainingWorker(worker_config(setup_of(model_dir, dtype), model_type))
    worker.reset()
    return worker


def _data(sequences: Sequence[Tensor], temperature: float) -> TensorDict:
    data = nested_batch(sequences, {"loss_mask": [torch.ones_like(ids) for ids in sequences]})
    tu.assign_non_tensor(
        data,
        temperature=temperature,
        calculate_entropy=False,
        global_batch_size=len(sequences),
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=len(sequences),
        use_remove_padding=True,
    )
    return data
