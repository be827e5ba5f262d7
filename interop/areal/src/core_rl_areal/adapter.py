"""AReaL's FSDP engine behind the calls of the suite: its own `train_batch`, losses, cut, clipping and schedule."""

from __future__ import annotations

import json
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from areal.api import FinetuneSpec, SaveLoadMeta
from areal.api.cli_args import MicroBatchSpec, NormConfig, OptimizerConfig, PPOActorConfig, TrainEngineConfig
from areal.engine.fsdp_engine import FSDPLMEngine, FSDPPPOActor
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedTokenizerFast

from core_rl.errors import ConfigError
from core_rl_areal.attention import PACKED
from core_rl_conformance.trainers.interface import SGD, MicroBatches, TrainerSetup, TrainSequence
from core_rl_oracle.loss_names import AdvantageRule

NO_LIMIT = 1e9
"""For limits that AReaL can't turn off."""
NORMALIZATIONS: Mapping[AdvantageRule, Mapping[str, Any]] = {
    "grpo": {"mean_level": "group", "std_level": "group"},
    "dr_grpo": {"mean_level": "group", "std_level": None},
    "rloo": {"mean_level": "group", "std_level": None, "mean_leave1out": True},
}
"""Fields of `NormConfig` by rule."""
ADAPTER = ".default"
"""The adapter's name in names of its parameters, but not in its file."""
GROUP = 4
"""Completions of a prompt, which AReaL takes from its configuration."""


class _Gradients:
    """A step that can be left out, so that gradients stay as `train_batch` made them."""

    applies = True

    def optimizer_step(self) -> dict[str, float]:
        step: dict[str, float] = super().optimizer_step() if self.applies else {}  # type: ignore[misc]
        return step


class _LMEngine(_Gradients, FSDPLMEngine):  # type: ignore[misc]  # it is not annotated here
    pass


class _Actor(_Gradients, FSDPPPOActor):  # type: ignore[misc]
    pass


class _BlackBox(ABC):
    """One rank of an engine, for one optimizer step at a time."""

    scope: str
    """Of AReaL's statistics."""
    loss: str
    """Name of the loss in them."""

    def __init__(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="core-rl-areal-"))
        self._engine: Any = None

    @abstractmethod
    def _make(self, config: Mapping[str, Any], setup: TrainerSetup) -> Any:
        """The engine, with ``config`` of its `TrainEngineConfig`."""

    @abstractmethod
    def _update(self, engine: Any, sequences: Sequence[TrainSequence]) -> None:
        """One batch by the method of AReaL's training loop."""

    # -------------------------------------------------------------------- calls

    def build(self, setup: TrainerSetup) -> None:
        """Make the engine, its process groups, optimizer and schedule."""
        if unknown := sorted(set(setup.options) - {"attention"}):
            raise ConfigError(f"unknown options {unknown}; the trainer takes 'attention' alone")
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo")
        if self._engine is not None:
            self._engine.destroy()
        engine = self._make(engine_fields(setup, self._directory / "model"), setup)
        # AReaL's configuration refuses attention that is registered with transformers.
        engine.config.attn_impl = setup.options.get("attention", PACKED)
        engine.create_process_group()
        steps = setup.schedule.total_steps or max(1, setup.schedule.warmup_steps)
        engine.initialize(None, FinetuneSpec(total_train_epochs=1, dataset_size=steps, train_batch_size=1))
        if setup.adapter_dir is not None:
            _load_adapter(engine.model, setup.adapter_dir)
        self._engine = engine

    def train_batch(
        self, sequences: Sequence[TrainSequence], cut: MicroBatches, apply: bool = True
    ) -> Mapping[str, float]:
        """As a step of AReaL's training loop; metrics are its statistics."""
        engine = self.engine
        # The same on all ranks: AReaL raises where a rank has fewer sequences.
        count = torch.tensor(-(-len(sequences) // cut.sequences) if cut.sequences else 1)
        torch.distributed.all_reduce(count, torch.distributed.ReduceOp.MIN)
        engine.config.mb_spec = MicroBatchSpec(n_mbs=int(count), max_tokens_per_mb=cut.max_tokens)
        engine.applies = apply
        self._update(engine, sequences)
        if apply:
            engine.step_lr_scheduler()
        metrics: dict[str, float] = engine.export_stats()
        metrics["loss"] = metrics[f"{self.scope}/{self.loss}/avg"]
        if apply:
            metrics["grad_norm"] = metrics[f"{self.scope}/grad_norm"]
        return metrics

    def gradients(self) -> Mapping[str, Tensor]:
        """All trained parameters."""
        return {
            name.replace(ADAPTER, ""): torch.zeros_like(p) if p.grad is None else _full(p.grad)
            for name, p in self.engine.model.named_parameters()
            if p.requires_grad
        }

    def weights(self) -> Mapping[str, Tensor]:
        """Master weights of FSDP."""
        return {name: _full(p.detach()) for name, p in self.engine.model.named_parameters()}

    def learning_rate(self) -> float:
        """Of the optimizer."""
        return float(self.engine.optimizer.param_groups[0]["lr"])

    def save(self, path: str) -> None:
        """As AReaL's recovery does."""
        self.engine.save(SaveLoadMeta(path=path, weight_format="dcp", with_optim=True))

    def load(self, path: str) -> None:
        """As AReaL's recovery does."""
        self.engine.load(SaveLoadMeta(path=path, weight_format="dcp", with_optim=True))

    def close(self) -> None:
        """Leave the process group, and remove the files."""
        if self._engine is not None:
            self._engine.destroy()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        shutil.rmtree(self._directory, ignore_errors=True)

    @property
    def engine(self) -> Any:
        """The engine. Raises `ConfigError` before `build`."""
        if self._engine is None:
            raise ConfigError("there is no engine; call build() first")
        return self._engine


def engine_fields(setup: TrainerSetup, path: Path) -> dict[str, Any]:
    """Fields of `TrainEngineConfig`, for the model with a tokenizer at ``path``."""
    shutil.copytree(setup.model_dir, path, dirs_exist_ok=True)
    _tokenizer().save_pretrained(path)
    return {
        "experiment_name": "core-rl",
        "trial_name": "conformance",
        "path": str(path),
        "backend": f"fsdp:d{setup.ranks}",
        "dtype": setup.dtype,
        "optimizer_dtype": "float32",
        "temperature": setup.loss.temperature,
        "optimizer": _optimizer(setup),
        **_lora(setup.adapter_dir),
    }


def _lora(path: str | None) -> dict[str, Any]:
    """Fields of `TrainEngineConfig` for an adapter of the size of the adapter in ``path``."""
    if path is None:
        return {}
    config = json.loads((Path(path) / "adapter_config.json").read_text())
    return {
        "use_lora": True,
        "lora_rank": config["r"],
        "lora_alpha": config["lora_alpha"],
        "target_modules": config["target_modules"],
    }


def _load_adapter(model: nn.Module, path: str) -> None:
    """Fill the factors, which AReaL draws and has no call to load."""
    factors = load_file(Path(path) / "adapter_model.safetensors")
    parameter: Any  # it is sharded
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            value = factors[name.replace(ADAPTER, "")].to(parameter.dtype)
            sharded = distribute_tensor(value, parameter.device_mesh, parameter.placements)
            parameter.data.copy_(sharded)


def _tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer for the engine, which loads one and needs none: sequences come as ids."""
    model = WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), pad_token="<pad>", eos_token="<eos>")


def _optimizer(setup: TrainerSetup) -> OptimizerConfig:
    optimizer, schedule = setup.optimizer, setup.schedule
    if isinstance(optimizer, SGD):
        return OptimizerConfig(type="sgd", lr=optimizer.lr, weight_decay=0.0, gradient_clipping=NO_LIMIT)
    steps = schedule.total_steps or max(1, schedule.warmup_steps)
    return OptimizerConfig(
        lr=optimizer.lr,
        beta1=optimizer.betas[0],
        beta2=optimizer.betas[1],
        eps=optimizer.eps,
        weight_decay=0.0,
        lr_scheduler_type=schedule.type,
        # AReaL rounds the product with the number of steps down.
        warmup_steps_proportion=(schedule.warmup_steps + 0.5) / steps if schedule.warmup_steps else 0.0,
        gradient_clipping=optimizer.max_grad_norm or NO_LIMIT,
    )


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def _row(sequence: TrainSequence) -> dict[str, Tensor]:
    """One sequence as a batch of one."""
    return {
        "input_ids": sequence.input_ids[None],
        "attention_mask": torch.ones_like(sequence.input_ids)[None],
        "loss_mask": sequence.loss_mask.long()[None],
    }


class SFTBlackBox(_BlackBox):
    """`FSDPLMEngine`, by its `train_lm`."""

    scope = "sft"
    loss = "loss"

    def _make(self, config: Mapping[str, Any], setup: TrainerSetup) -> Any:
        return _LMEngine(TrainEngineConfig(**config))

    def _update(self, engine: Any, sequences: Sequence[TrainSequence]) -> None:
        engine.train_lm([_row(sequence) for sequence in sequences])


class PPOBlackBox(_BlackBox):
    """`FSDPPPOActor`, by its `compute_advantages` and `ppo_update`."""

    scope = "ppo_actor/update"
    loss = "actor_loss"

    def __init__(self) -> None:
        super().__init__()
        self._rule: AdvantageRule | None = None

    def _make(self, config: Mapping[str, Any], setup: TrainerSetup) -> Any:
        loss, self._rule = setup.loss, setup.advantages
        norm = NORMALIZATIONS[self._rule] if self._rule else None
        return _Actor(
            PPOActorConfig(
                **config,
                ppo_n_minibatches=1,
                eps_clip=loss.clip_low,
                eps_clip_higher=loss.clip_high,
                c_clip=loss.dual_limit if loss.objective == "dual_clipped" else None,
                importance_sampling_level="sequence" if loss.objective == "gspo" else "token",
                reward_norm=NormConfig(**norm, group_size=GROUP) if norm else None,
                reward_clip=NO_LIMIT,
                kl_ctl=0.0,
            )
        )

    def _update(self, engine: Any, sequences: Sequence[TrainSequence]) -> None:
        groups = [sequence.group for sequence in sequences]
        if self._rule and any(len(set(groups[n : n + GROUP])) != 1 for n in range(0, len(groups), GROUP)):
            raise ConfigError(f"groups {groups} of a rank are not of {GROUP} neighbours; send whole groups")
        rows = engine.compute_advantages([_rollout(sequence) for sequence in sequences])
        if self._rule is None:
            for row, sequence in zip(rows, sequences, strict=True):
                # Fields of a token stand at the token before it, which predicts it.
                row["advantages"] = sequence.advantages.roll(-1)[None]
        engine.ppo_update(rows)


def _rollout(sequence: TrainSequence) -> dict[str, Tensor]:
    return {
        **_row(sequence),
        "logprobs": sequence.old_logprobs[None],
        "rewards": torch.tensor([sequence.reward]),
    }
