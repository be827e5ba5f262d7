"""Names of the batch fields that algorithms read and write, and checks of them."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

import torch
from torch import Tensor

from core_rl.data.batch import SequenceBatch
from core_rl.errors import BatchError

# Token fields, float32 [T].
BEHAVIOUR = "logprobs"
"""Log-probs under the policy that generated the tokens, as the rollout engine reported them."""
PROXIMAL = "prox_logprobs"
"""Log-probs under the policy before this step's updates, recomputed by the train engine."""
REFERENCE = "ref_logprobs"
"""Log-probs under the frozen reference policy."""
TOKEN_REWARDS = "token_rewards"  # noqa: S105  (no password)
"""The reward of each trained token: the KL penalty, and the sequence's reward at its last trained token."""
VALUES = "values"
"""The critic's value of the state before each token, before this step's updates."""
RETURNS = "returns"
"""The target of the critic."""
ADVANTAGES = "advantages"
"""The factor of log-probs or ratios in the policy loss."""
IMPORTANCE = "importance_weights"
"""Off-policy correction: the weight of each token's policy loss."""

# Sequence fields, [B].
REWARDS = "rewards"
"""The reward of each whole sequence."""
GROUP = "group"
"""The number of each sequence's prompt: integers."""
BASELINE_REWARDS = "baseline_rewards"
"""ReMax: the reward of the greedy completion of the same prompt."""
BOOTSTRAP = "bootstrap"
"""The critic's value of the state after the last token."""
SCORES = "scores"
"""A reward model's score."""
CHOSEN = "chosen"
"""Bool: the sequence is preferred over the second of its pair."""
MARGIN = "margin"
"""Optional: required lead of the preferred sequence, the same for both of a pair."""


def require_fields(consumer: str, batch: SequenceBatch, needed: AbstractSet[str]) -> None:
    """Raise `BatchError` that lists the fields that ``who`` needs and ``batch`` lacks."""
    missing = sorted(name for name in needed if name not in batch)
    if missing:
        present = sorted([*batch.tokens, *batch.sequences])
        raise BatchError(f"{consumer} needs the fields {missing}; the batch has {present}")


def check_finite(rewards: Tensor, name: str) -> None:
    """Raise `BatchError` that names the first sequence whose entry of ``rewards [B]`` is not finite."""
    wrong = (~torch.isfinite(rewards)).nonzero().flatten().tolist()
    if wrong:
        raise BatchError(
            f"the {name} of sequence {wrong[0]} is {float(rewards[wrong[0]])} ({len(wrong)} of {len(rewards)} "
            "are not finite); make the reward function return finite numbers"
        )
