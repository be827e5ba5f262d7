"""verl's `TrainingWorker` behind the calls of the suite, with its FSDP engine, losses, cut, schedule and metrics."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.tensor import DTensor
from verl.trainer.config import CheckpointConfig
from verl.trainer.ppo import core_algos
from verl.utils import tensordict_utils as tu
from verl.utils.metric import Metric, reduce_metrics
from verl.workers.config import (
    ActorConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    PolicyLossConfig,
    TrainingWorkerConfig,
)
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import ppo_loss, sft_loss

from core_rl.errors import ConfigError, LayoutError
from core_rl_conformance.trainers.interface import SGD, MicroBatches, TrainerSetup, TrainSequence
from core_rl_oracle.loss_names import AdvantageRule

AGGREGATIONS = {
    "token_mean": "token-mean",
    "sequence_mean": "seq-mean-token-mean",
    "fixed_length": "seq-mean-token-sum-norm",
}
OBJECTIVES = {
    "reinforce": "gpg",
    "clipped": "vanilla",
    "dual_clipped": "vanilla",
    "gspo": "gspo",
    "cispo": "cispo",
}
DTYPES = {"float32": "fp32", "bfloat16": "bf16"}
NO_LIMIT = 1e9
"""Of a norm or a dual clip that is off."""
DEFAULT_FACTOR = "default_scale_factor"
"""Option that leaves ``loss_scale_factor`` at null, verl's default."""
OFFLOAD = "offload"
"""Option that turns ``param_offload`` and ``optimizer_offload`` on."""
OPTIONS = {DEFAULT_FACTOR, OFFLOAD}
ADAPTER = ".default"
"""The adapter's name in names of its parameters, but not in its file."""
UNJUDGED = ("perf/", "lr", "mfu")


class _BlackBox(ABC):
    """A `TrainingWorker` on this rank, as `verl.trainer.sft_trainer` runs it under torchrun."""

    def __init__(self) -> None:
        self._worker: TrainingWorker | None = None
        self._setup: TrainerSetup | None = None

    @abstractmethod
    def _loss(self, setup: TrainerSetup) -> Callable[..., Any]:
        """The loss function of the worker."""

    @abstractmethod
    def _data(self, setup: TrainerSetup, sequences: Sequence[TrainSequence]) -> TensorDict:
        """The rank's sequences as verl's data pipeline makes them."""

    # -------------------------------------------------------------------- calls

    def build(self, setup: TrainerSetup) -> None:
        """A fresh worker; the process group stays."""
        if unknown := sorted(setup.options.keys() - OPTIONS):
            raise ConfigError(f"unknown options {unknown}; the trainer takes {sorted(OPTIONS)}")
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        self._setup = setup
        self._worker = TrainingWorker(worker_config(setup))
        self._worker.reset()
        self._worker.set_loss_fn(self._loss(setup))

    def train_batch(
        self, sequences: Sequence[TrainSequence], cut: MicroBatches, apply: bool = True
    ) -> Mapping[str, float]:
        """`TrainingWorker.train_batch`, or its passes without the optimizer step."""
        worker = self.worker
        assert self._setup is not None
        counts = _gathered(len(sequences))
        if min(counts) < max(counts):
            raise LayoutError(
                f"ranks have {counts} sequences, and verl's workers wait for equal numbers of micro-batches; use a "
                "number of ranks that divides the batch"
            )
        data = self._data(self._setup, sequences)
        tu.assign_non_tensor(
            data,
            temperature=self._setup.loss.temperature,
            calculate_entropy=self._setup.loss.entropy_coef != 0,
            global_batch_size=sum(counts),
            use_dynamic_bsz=cut.max_tokens is not None,
            max_token_len_per_gpu=cut.max_tokens,
            micro_batch_size_per_gpu=cut.sequences or len(sequences),
            use_remove_padding=True,
            update_lr_scheduler=True,
        )
        return _reduced(worker.train_batch(data) if apply else _passes(worker, data))

    def gradients(self) -> Mapping[str, Tensor]:
        """All trained parameters."""
        return {
            name.replace(ADAPTER, ""): _full(torch.zeros_like(p) if p.grad is None else p.grad)
            for name, p in self._parameters()
            if p.requires_grad
        }

    def weights(self) -> Mapping[str, Tensor]:
        """Float32."""
        return {name: _full(p.detach()) for name, p in self._parameters()}

    def learning_rate(self) -> float:
        """Of verl's schedule."""
        return float(self.worker.engine.lr_scheduler.get_last_lr()[0])

    def save(self, path: str) -> None:
        """A checkpoint of verl's: model, optimizer, schedule and random state of each rank."""
        self.worker.save_checkpoint(path)

    def load(self, path: str) -> None:
        """Continue from it."""
        self.worker.load_checkpoint(path, del_local_after_load=False)

    def close(self) -> None:
        """End the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()

    @property
    def worker(self) -> TrainingWorker:
        """The `TrainingWorker`. Raises `ConfigError` before `build`."""
        if self._worker is None:
            raise ConfigError("there is no worker; call build() first")
        return self._worker

    def _parameters(self) -> list[tuple[str, Any]]:
        return list(self.worker.engine.module.named_parameters())


class SFTBlackBox(_BlackBox):
    """`sft_loss`."""

    def _loss(self, setup: TrainerSetup) -> Callable[..., Any]:
        return partial(sft_loss, config=None)

    def _data(self, setup: TrainerSetup, sequences: Sequence[TrainSequence]) -> TensorDict:
        return nested_batch(_ids(sequences), {"loss_mask": [row.loss_mask.long() for row in sequences]})


class PPOBlackBox(_BlackBox):
    """`ppo_loss` on given completions."""

    def _loss(self, setup: TrainerSetup) -> Callable[..., Any]:
        loss = setup.loss
        fixed = loss.aggregation == "fixed_length" and not setup.options.get(DEFAULT_FACTOR)
        config = ActorConfig(
            strategy="fsdp2",
            rollout_n=1,
            use_dynamic_bsz=True,
            policy_loss=PolicyLossConfig(loss_mode=OBJECTIVES[loss.objective]),
            loss_agg_mode=AGGREGATIONS[loss.aggregation],
            loss_scale_factor=loss.fixed_length if fixed else None,
            clip_ratio_low=loss.clip_low,
            clip_ratio_high=loss.clip_high,
            clip_ratio_c=loss.dual_limit if loss.objective == "dual_clipped" else NO_LIMIT,
            entropy_coeff=loss.entropy_coef,
            use_kl_loss=loss.kl_coef != 0,
            kl_loss_coef=loss.kl_coef,
            kl_loss_type=loss.kl_estimator,
        )
        return partial(ppo_loss, config=config)

    def _data(self, setup: TrainerSetup, sequences: Sequence[TrainSequence]) -> TensorDict:
        """Completions begin at the first trained token that has a token before it."""
        starts = [max(1, int(row.loss_mask.int().argmax())) for row in sequences]
        pairs = list(zip(sequences, starts, strict=True))
        masks = [row.loss_mask[start:].long() for row, start in pairs]
        advantages = [row.advantages[start:] for row, start in pairs]
        if setup.advantages is not None:
            values = _advantages(setup.advantages, sequences)
            advantages = [value * mask for value, mask in zip(values, masks, strict=True)]
        fields = {
            "prompts": [row.input_ids[:start] for row, start in pairs],
            "responses": [row.input_ids[start:] for row, start in pairs],
            "response_mask": masks,
            "loss_mask": masks,
            "advantages": advantages,
            "old_log_probs": [row.old_logprobs[start:] for row, start in pairs],
        }
        if setup.loss.kl_coef:
            fields["ref_log_prob"] = [row.ref_logprobs[start:] for row, start in pairs]
        return nested_batch(_ids(sequences), fields)


def _advantages(rule: AdvantageRule, sequences: Sequence[TrainSequence]) -> Tensor:
    """Advantages of the rank's sequences, from the rewards of all: verl takes them before it spreads a batch."""
    parts = _gathered([(row.reward, row.group) for row in sequences])
    rewards, groups = zip(*chain.from_iterable(parts), strict=True)
    scores = torch.tensor(rewards)[:, None]
    mask, index = torch.ones_like(scores), np.array(groups)
    if rule == "rloo":
        values, _ = core_algos.compute_rloo_outcome_advantage(scores, mask, index)
    else:
        normed = rule == "grpo"
        values, _ = core_algos.compute_grpo_outcome_advantage(
            scores, mask, index, norm_adv_by_std_in_grpo=normed
        )
    before = sum(len(part) for part in parts[: dist.get_rank()])
    local: Tensor = values[before : before + len(sequences), 0]
    return local


def worker_config(setup: TrainerSetup, model_type: str = "language_model") -> TrainingWorkerConfig:
    """Verl's config of a worker with the FSDP engine."""
    optimizer, schedule = setup.optimizer, setup.schedule
    if isinstance(optimizer, SGD):
        raise ConfigError("the trainer has AdamW alone, and was given SGD; declare no 'sgd'")
    dtype, offload = DTYPES[setup.dtype], bool(setup.options.get(OFFLOAD))
    return TrainingWorkerConfig(
        model_type=model_type,
        model_config=HFModelConfig(
            path=setup.model_dir,
            load_tokenizer=False,
            enable_gradient_checkpointing=False,
            # The only attention on a CPU that has Gemma's soft cap; packed rows are masked by their positions.
            override_config={"attn_implementation": "eager"},
            **_lora(setup.adapter_dir),
        ),
        engine_config=FSDPEngineConfig(
            strategy="fsdp2",
            mixed_precision={"param_dtype": dtype, "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
            use_torch_compile=False,
            param_offload=offload,
            optimizer_offload=offload,
        ),
        optimizer_config=FSDPOptimizerConfig(
            lr=optimizer.lr,
            betas=optimizer.betas,
            weight_decay=0.0,
            clip_grad=optimizer.max_grad_norm or NO_LIMIT,
            override_optimizer_config={"eps": optimizer.eps},
            lr_scheduler_type=schedule.type,
            lr_warmup_steps=schedule.warmup_steps,
            total_training_steps=schedule.total_steps or 1,
        ),
        checkpoint_config=CheckpointConfig(),
    )


def _lora(path: str | None) -> dict[str, Any]:
    """Fields of `HFModelConfig` for the adapter in ``path``; the rank alone turns adapters on."""
    if path is None:
        return {}
    config = json.loads((Path(path) / "adapter_config.json").read_text())
    return {"lora_adapter_path": path, "lora_rank": config["r"], "lora_alpha": config["lora_alpha"]}


def _passes(worker: TrainingWorker, data: TensorDict) -> TensorDict:
    """`TrainingWorker.train_batch` without the optimizer step; gradients stay."""
    engine = worker.engine
    engine.optimizer_zero_grad()
    with engine.train_mode(zero_grad_on_exit=False):
        output = engine.forward_backward_batch(data, worker.loss_fn)
    return worker._postprocess_output(
        output, global_token_num=None, delta_time=0.0, forward_only=False, images_seqlens=None
    )


def _reduced(output: TensorDict) -> dict[str, float]:
    """Metrics over micro-batches and ranks, as `TrainingWorker.train_mini_batch` and the trainer reduce them."""
    metrics = dict(tu.get(output, "metrics"))
    for name, value in metrics.items():
        if isinstance(value, list):
            by_rank = isinstance(value[0], Metric)
            metrics[name] = Metric.aggregate_dp(value) if by_rank else list(chain.from_iterable(value))
    reduced = reduce_metrics(
        {name: value for name, value in metrics.items() if not name.startswith(UNJUDGED)}
    )
    return {name: float(value) for name, value in reduced.items()}


def _ids(sequences: Sequence[TrainSequence]) -> list[Tensor]:
    return [row.input_ids for row in sequences]


def nested_batch(ids: Sequence[Tensor], fields: Mapping[str, Sequence[Tensor]]) -> TensorDict:
    """Rows of ``ids`` with their ``fields`` as nested tensors, as verl's data pipelines of both kinds pass them."""
    rows = {"input_ids": ids, "position_ids": [torch.arange(len(row)) for row in ids], **fields}
    nested = {
        name: torch.nested.as_nested_tensor(list(values), layout=torch.jagged)
        for name, values in rows.items()
    }
    return TensorDict(nested, batch_size=[len(ids)])


def _gathered(value: Any) -> list[Any]:
    """``value`` of every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor().clone() if isinstance(tensor, DTensor) else tensor.clone()
