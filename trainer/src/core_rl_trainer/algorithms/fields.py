"""Names of the batch fields that algorithms read and write."""

from __future__ import annotations

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
"""Whether the sequence is the preferred one of its pair: bool."""
MARGIN = "margin"
"""Optional: by how much the preferred one should be ahead, the same for both of a pair."""
