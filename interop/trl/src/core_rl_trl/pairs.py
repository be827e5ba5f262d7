"""`DPOTrainer` and `RewardTrainer` behind the calls of the suite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from datasets import Dataset
from transformers import AutoModelForSequenceClassification, PreTrainedModel
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer

from core_rl.errors import BatchError
from core_rl_conformance.trainers.interface import TrainSequence
from core_rl_oracle.policy_losses import PolicyLoss
from core_rl_trl.black_box import BlackBox, make_tokenizer

COUNTER = "num_tokens"
"""A count of the whole run, and of no batch."""


class _PairBlackBox(BlackBox):
    """A trainer whose rows are pairs."""

    def _inputs(self, trainer: Any, batches: Sequence[Sequence[TrainSequence]]) -> list[dict[str, Any]]:
        trainer._metrics["train"].clear()
        return [trainer.data_collator([self._row(*pair) for pair in _pairs(batch)]) for batch in batches]

    def _row(self, preferred: TrainSequence, rejected: TrainSequence) -> dict[str, Any]:
        """The columns that the collator reads."""
        return {"chosen_ids": preferred.input_ids.tolist(), "rejected_ids": rejected.input_ids.tolist()}

    def _logged(self, trainer: Any) -> Mapping[str, float]:
        """Means of micro-batches, as `log` takes them."""
        metrics = trainer._metrics["train"].items()
        return {name: sum(values) / len(values) for name, values in metrics if name != COUNTER}


def _pairs(batch: Sequence[TrainSequence]) -> list[tuple[TrainSequence, TrainSequence]]:
    """Neighbours of one group: a row of TRL's datasets has both, and cannot be anything else."""
    groups = [row.group for row in batch]
    if groups[::2] != groups[1::2]:
        raise BatchError(f"neighbours have the groups {groups}; give pairs of one group each")
    return list(zip(batch[::2], batch[1::2], strict=True))


class DPOBlackBox(_PairBlackBox):
    """`DPOTrainer` with given log-probs of the reference."""

    config_class = DPOConfig

    def _make(self, model: PreTrainedModel, config: Any) -> Any:
        trainer = DPOTrainer(
            model=model,
            args=config,
            train_dataset=Dataset.from_list([{"prompt": "w2", "chosen": "w3", "rejected": "w4"}]),
            processing_class=make_tokenizer(model.config.vocab_size),
        )
        trainer.precompute_ref_logps = True  # batches have them, without a pass over the dataset above
        return trainer

    def _loss_arguments(self, loss: PolicyLoss) -> dict[str, Any]:
        return {"beta": loss.beta, "loss_type": ["sigmoid"], "router_aux_loss_coef": 0.0}

    def _row(self, preferred: TrainSequence, rejected: TrainSequence) -> dict[str, Any]:
        rows = {"chosen": preferred, "rejected": rejected}
        prompts = {name: int(row.loss_mask.int().argmax()) for name, row in rows.items()}
        references = {
            f"ref_{name}_logps": float(row.ref_logprobs[row.loss_mask].sum()) for name, row in rows.items()
        }
        ids = {f"{name}_ids": row.input_ids[prompts[name] :].tolist() for name, row in rows.items()}
        return {"prompt_ids": preferred.input_ids[: prompts["chosen"]].tolist(), **ids, **references}


class RewardBlackBox(_PairBlackBox):
    """`RewardTrainer` on tokenized pairs, with EOS for padding, its choice for a tokenizer without a padding token."""

    config_class = RewardConfig
    model_class = AutoModelForSequenceClassification

    def _make(self, model: PreTrainedModel, config: Any) -> Any:
        return RewardTrainer(
            model=model,
            args=config,
            train_dataset=Dataset.from_list([{"chosen_ids": [2, 3], "rejected_ids": [2, 4]}]),
            processing_class=make_tokenizer(model.config.vocab_size, pad_token=None),
        )

    def _loss_arguments(self, loss: PolicyLoss) -> dict[str, Any]:
        return {}
