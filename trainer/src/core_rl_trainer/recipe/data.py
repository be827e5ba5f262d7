"""The section ``data`` of a recipe."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from core_rl.config.base import Config

__all__ = ["DataSection"]


class DataSection(Config):
    """The data: JSONL files, or datasets that ``datasets.save_to_disk`` wrote.

    Examples for rollouts have a ``prompt`` (a text, or chat messages) and whatever the reward function reads; those for
    ``sft`` an ``answer`` besides, or ``messages`` alone; those for ``reward_model`` and ``dpo`` the completions
    ``chosen`` and ``rejected``.
    """

    train: str
    """Examples to train on."""
    eval: str
    """Examples for evaluation."""
    batch_size: int = Field(default=16, ge=1)
    """Examples of one training step where nothing is rolled out."""
    too_long: Literal["refuse", "drop"] = "refuse"
    """The treatment of examples that are longer than the model's context, counting ``rollout.max_new_tokens`` where
    there are rollouts: an error that names them, or a warning that counts them."""
