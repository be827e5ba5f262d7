"""Names of what a trainer computes, light to import."""

from __future__ import annotations

from typing import Literal

Objective = Literal[
    "cross_entropy", "reinforce", "clipped", "dual_clipped", "gspo", "cispo", "dpo", "bradley_terry"
]
"""``cross_entropy``: supervised training, without advantages.
``reinforce``: ``A * log p`` (Williams, Machine Learning 8, 1992).
``clipped``: PPO (arXiv:1707.06347, equation 7), with two clip bounds as in DAPO (arXiv:2503.14476).
``dual_clipped``: the same, at least ``dual_limit * A`` where ``A < 0`` (arXiv:1912.09729, equation 5).
``gspo``: ``clipped`` with the geometric mean of a sequence's ratios (arXiv:2507.18071, equations 5 to 7).
``cispo``: ``sg(clip(r)) * A * log p`` (MiniMax-M1, arXiv:2506.13585, equation 4).
``dpo``: ``log sigmoid(beta * gap)`` of the gap between the log-ratios to the reference of two completions
(arXiv:2305.18290, equation 7).
``bradley_terry``: ``log sigmoid(gap)`` of the gap between two scores of a reward model (Bradley and Terry, Biometrika
39, 1952; arXiv:2203.02155, equation 1)."""
PAIRWISE: frozenset[Objective] = frozenset({"dpo", "bradley_terry"})
"""Objectives on pairs, whose loss is the mean over pairs, without an aggregation of tokens."""
Aggregation = Literal["token_mean", "sequence_mean", "fixed_length"]
"""``token_mean``: the mean over trained tokens of the whole batch (DAPO).
``sequence_mean``: the mean over sequences of the mean over their trained tokens (GRPO, arXiv:2402.03300).
``fixed_length``: the sum over tokens, divided by sequences times a constant (Dr. GRPO, arXiv:2503.20783)."""
KLEstimator = Literal["k1", "k2", "k3"]
"""Estimators of KL(policy || reference) by J. Schulman, http://joschu.net/blog/kl-approx.html."""
AdvantageRule = Literal["grpo", "dr_grpo", "rloo"]
"""``grpo``: ``(r - mean) / standard deviation`` of the group (arXiv:2402.03300); zeros where all rewards are equal.
``dr_grpo``: ``r - mean`` (arXiv:2503.20783). ``rloo``: ``r`` minus the mean of the others (arXiv:2402.14740)."""
