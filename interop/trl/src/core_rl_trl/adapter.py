"""`SFTTrainer` and `GRPOTrainer` behind the calls of the suite."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from core_rl_conformance.trainers.interface import TrainSequence
from core_rl_oracle.policy_losses import PolicyLoss
from core_rl_trl.black_box import BlackBox, changed, make_tokenizer

IGNORED = -100
LOSS_TYPES = {"token_mean": "dapo", "sequence_mean": "grpo", "fixed_length": "dr_grpo"}
"""``loss_type`` of `GRPOTrainer` by aggregation."""


class SFTBlackBox(BlackBox):
    """`SFTTrainer`."""

    config_class = SFTConfig

    def _make(self, model: PreTrainedModel, config: Any) -> Any:
        rows = Dataset.from_list([{"input_ids": [0, 1], "labels": [0, 1]}])
        config = changed(config, {"dataset_kwargs": {"skip_prepare_dataset": True}, "max_length": None})
        return SFTTrainer(
            model=model,
            args=config,
            train_dataset=rows,
            processing_class=make_tokenizer(model.config.vocab_size),
        )

    def _loss_arguments(self, loss: PolicyLoss) -> dict[str, Any]:
        return {}

    def _inputs(self, trainer: Any, batches: Sequence[Sequence[TrainSequence]]) -> list[dict[str, Any]]:
        return [trainer.data_collator([_labelled(row) for row in batch]) for batch in batches]


def _labelled(row: TrainSequence) -> dict[str, list[int]]:
    labels = torch.where(row.loss_mask, row.input_ids, IGNORED)
    return {"input_ids": row.input_ids.tolist(), "labels": labels.tolist()}


class _Given(GRPOTrainer):  # type: ignore[misc]  # it is not annotated here
    """`GRPOTrainer` that takes its batches from the caller, without generation."""

    def _prepare_inputs(self, generation_batch: dict[str, Any]) -> dict[str, Any]:
        return generation_batch


class GRPOBlackBox(BlackBox):
    """`GRPOTrainer` on given completions."""

    config_class = GRPOConfig

    def _make(self, model: PreTrainedModel, config: Any) -> Any:
        return _Given(
            model=model,
            reward_funcs=_no_reward,
            args=config,
            train_dataset=Dataset.from_list([{"prompt": "w2"}, {"prompt": "w3"}]),
            processing_class=make_tokenizer(model.config.vocab_size),
        )

    def _loss_arguments(self, loss: PolicyLoss) -> dict[str, Any]:
        return {
            "per_device_train_batch_size": 2,
            "num_generations": 2,
            "loss_type": LOSS_TYPES[loss.aggregation],
            "importance_sampling_level": "sequence" if loss.objective == "gspo" else "token",
            "epsilon": loss.clip_low,
            "epsilon_high": loss.clip_high,
            "delta": loss.dual_limit if loss.objective == "dual_clipped" else None,
            "max_completion_length": loss.fixed_length,
            "beta": loss.kl_coef,
            "use_bias_correction_kl": loss.kl_times_ratio,
            "entropy_coef": loss.entropy_coef,
            "temperature": loss.temperature,
        }

    def _inputs(self, trainer: Any, batches: Sequence[Sequence[TrainSequence]]) -> list[dict[str, Any]]:
        trainer.args.steps_per_generation = len(batches)
        tokens = sum(int(row.loss_mask[1:].sum()) for batch in batches for row in batch)
        return [{**_padded(batch), "num_items_in_batch": torch.tensor(tokens)} for batch in batches]

    def epoch(self, count: int, batch_size: int) -> Sequence[Sequence[int]]:
        """Prompts, each once: the sampler repeats them for their completions, and batches for their reuse."""
        batches = super().epoch(count, batch_size)
        trainer = self.trainer
        return [batch[:: trainer.num_generations] for batch in batches[:: trainer.num_iterations]]

    def _resize(self, trainer: Any, batch_size: int) -> None:
        completions = batch_size * trainer.num_generations
        trainer.args = changed(
            trainer.args, {"generation_batch_size": completions, "steps_per_generation": 1}
        )
        super()._resize(trainer, completions)


def _no_reward(completions: Sequence[str], **_: Any) -> list[float]:
    raise AssertionError(f"{len(completions)} completions were generated, and all are given")


def _padded(batch: Sequence[TrainSequence]) -> dict[str, Tensor]:
    """A prompt of the first token and a completion of the rest, with the untrained ones in ``tool_mask``."""
    rest = [row.input_ids[1:] for row in batch]
    right = partial(pad_sequence, batch_first=True)
    return {
        "prompt_ids": torch.stack([row.input_ids[:1] for row in batch]),
        "prompt_mask": torch.ones(len(batch), 1, dtype=torch.long),
        "completion_ids": right(rest),
        "completion_mask": right([torch.ones_like(ids) for ids in rest]),
        "tool_mask": right([row.loss_mask[1:].long() for row in batch]),
        "advantages": right([row.advantages[1:] for row in batch]),
        "old_per_token_logps": right([row.old_logprobs[1:] for row in batch]),
        "ref_per_token_logps": right([row.ref_logprobs[1:] for row in batch]),
    }
