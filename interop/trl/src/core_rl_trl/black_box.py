"""The calls of the suite over a TRL trainer: its own `training_step`, counts of items, clipping and schedule."""

from __future__ import annotations

import runpy
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, set_seed

from core_rl.errors import ConfigError
from core_rl_conformance.trainers.interface import (
    RECIPE_STEPS,
    SGD,
    MicroBatches,
    TrainerSetup,
    TrainSequence,
)
from core_rl_oracle.policy_losses import PolicyLoss

NO_CLIPPING = 1e9
ADAPTER = ".default"
"""The adapter's name in names of its parameters, but not in its file."""


class BlackBox(ABC):
    """The loop of `Trainer` around its `training_step`, for one optimizer step at a time."""

    def __init__(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="core-rl-trl-"))
        self._trainer: Any = None

    config_class: type[Any]
    model_class: type[Any] = AutoModelForCausalLM

    @abstractmethod
    def _make(self, model: PreTrainedModel, config: Any) -> Any:
        """The trainer with ``config``, of its own class."""

    @abstractmethod
    def _loss_arguments(self, loss: PolicyLoss) -> dict[str, Any]:
        """Fields of the config for ``loss``."""

    @abstractmethod
    def _inputs(self, trainer: Any, batches: Sequence[Sequence[TrainSequence]]) -> list[dict[str, Any]]:
        """The micro-batches as the trainer's collator makes them."""

    # -------------------------------------------------------------------- calls

    def build(self, setup: TrainerSetup) -> None:
        """Load the model, and make the trainer of the loss."""
        if setup.options:
            raise ConfigError(
                f"the trainer takes no options, and was given {sorted(setup.options)}; remove these"
            )
        arguments = {**_arguments(setup), **self._loss_arguments(setup.loss), **self._plain_arguments()}
        self._build(self.config_class(**arguments), setup.model_dir, setup.adapter_dir)

    def build_recipe(self, recipe: str, model_dir: str) -> None:
        """The config in a Python file, as its variable ``args``; output, devices and logging are set for a check."""
        try:
            given = runpy.run_path(recipe).get("args")
        except ValueError as error:  # of the config, such as bf16 on a CPU
            raise ConfigError(f"{recipe}: {error}") from error
        if not isinstance(given, self.config_class):
            raise ConfigError(
                f"{recipe}: the variable 'args' is {given!r}; assign a {self.config_class.__name__} to it"
            )
        precise = {"fp16": False, "mixed_precision": "no"}  # the constructor derives the latter from bf16
        self._build(changed(given, self._plain_arguments() | precise), model_dir)

    def _plain_arguments(self) -> dict[str, Any]:
        """Fields of `TrainingArguments` for one CPU, without files and logs."""
        return {
            "output_dir": str(self._directory),
            "use_cpu": True,
            "bf16": False,
            "gradient_checkpointing": False,
            "report_to": "none",
            "save_strategy": "no",
            "logging_strategy": "no",
            "disable_tqdm": True,
        }

    def _build(self, config: Any, model_dir: str, adapter_dir: str | None = None) -> None:
        model: Any = self.model_class.from_pretrained(model_dir, dtype=torch.float32, local_files_only=True)
        if adapter_dir is not None:
            model = PeftModel.from_pretrained(model, adapter_dir, is_trainable=True)
        self._trainer = self._make(model, config)
        steps = config.max_steps if config.max_steps > 0 else RECIPE_STEPS
        self._trainer.create_optimizer_and_scheduler(steps)

    def train_batch(
        self, sequences: Sequence[TrainSequence], cut: MicroBatches, apply: bool = True
    ) -> Mapping[str, float]:
        """As an iteration of the loop in `Trainer._run_epoch`."""
        trainer = self.trainer
        size = cut.sequences or len(sequences)
        batches = [sequences[start : start + size] for start in range(0, len(sequences), size)]
        inputs = self._inputs(trainer, batches)
        trainer.current_gradient_accumulation_steps = len(inputs)
        items = trainer._get_num_items_in_batch(inputs, trainer.args.device)
        model = trainer.model
        model.zero_grad()
        total = sum(float(trainer.training_step(model, batch, items)) for batch in inputs)
        metrics = {"loss": total, **self._logged(trainer)}
        if not apply:
            return metrics
        norm = float(trainer._clip_grad_norm(model))
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
        return {**metrics, "grad_norm": norm}

    def _logged(self, trainer: Any) -> Mapping[str, float]:
        """Metrics of the batch as the trainer logs them."""
        return {}

    def gradients(self) -> Mapping[str, Tensor]:
        """All trained parameters."""
        trained = [(name, p) for name, p in self.trainer.model.named_parameters() if p.requires_grad]
        return {
            name.replace(ADAPTER, ""): torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for name, p in trained
        }

    def weights(self) -> Mapping[str, Tensor]:
        """Float32."""
        return {name: p.detach().clone() for name, p in self.trainer.model.named_parameters()}

    def learning_rate(self) -> float:
        """Of the optimizer."""
        return float(self.trainer.optimizer.param_groups[0]["lr"])

    def save(self, path: str) -> None:
        """Model, optimizer and schedule, as a checkpoint of `Trainer`."""
        trainer = self.trainer
        trainer.save_model(path)
        trainer._save_optimizer_and_scheduler(path)

    def load(self, path: str) -> None:
        """As ``resume_from_checkpoint`` does."""
        trainer = self.trainer
        trainer._load_from_checkpoint(path)
        trainer._load_optimizer_and_scheduler(path)

    def epoch(self, count: int, batch_size: int) -> Sequence[Sequence[int]]:
        """The first pass of the trainer's data loader over ``count`` indices in place of rows."""
        trainer = copy(self.trainer)
        self._resize(trainer, batch_size)
        trainer.train_dataset, trainer.data_collator = range(count), list
        set_seed(trainer.args.seed)  # the loader shuffles by the seed that the constructor sets
        return list(trainer.get_train_dataloader())

    def _resize(self, trainer: Any, batch_size: int) -> None:
        """Let the data loader of ``trainer`` make batches of so many rows."""
        trainer._train_batch_size = batch_size

    def close(self) -> None:
        """Remove the trainers' files."""
        shutil.rmtree(self._directory, ignore_errors=True)

    @property
    def trainer(self) -> Any:
        """A `Trainer`, whose attributes are optional before training. Raises `ConfigError` before `build`."""
        if self._trainer is None:
            raise ConfigError("there is no trainer; call build() first")
        return self._trainer


def _arguments(setup: TrainerSetup) -> dict[str, Any]:
    """Fields of `TrainingArguments` by the setup."""
    optimizer, schedule = setup.optimizer, setup.schedule
    named: dict[str, Any] = {"optim": "sgd", "learning_rate": optimizer.lr, "max_grad_norm": NO_CLIPPING}
    if not isinstance(optimizer, SGD):
        named |= {
            "optim": "adamw_torch",
            "adam_beta1": optimizer.betas[0],
            "adam_beta2": optimizer.betas[1],
            "adam_epsilon": optimizer.eps,
            "max_grad_norm": optimizer.max_grad_norm or NO_CLIPPING,
        }
    constant = "constant_with_warmup" if schedule.warmup_steps else "constant"
    return {
        **named,
        "seed": setup.seed,
        "lr_scheduler_type": constant if schedule.type == "constant" else schedule.type,
        "warmup_steps": schedule.warmup_steps,
        "max_steps": schedule.total_steps or 1,
        "weight_decay": 0.0,
    }


def changed(config: Any, fields: Mapping[str, Any]) -> Any:
    """A copy of a config with other ``fields``; built again, it would refuse fields that it has derived itself."""
    copied = copy(config)
    for name, value in fields.items():
        setattr(copied, name, value)
    return copied


def make_tokenizer(vocab_size: int, pad_token: str | None = "<pad>") -> PreTrainedTokenizerFast:
    """A tokenizer of the trainers' constructors alone: sequences come as ids."""
    words = {"<pad>": 0, "<eos>": 1, **{f"w{number}": number for number in range(2, vocab_size)}}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<pad>")),
        pad_token=pad_token,
        eos_token="<eos>",
    )
