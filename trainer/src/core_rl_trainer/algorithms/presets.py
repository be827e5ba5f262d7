"""Algorithms by one word: settings of the PPO actor that a name stands for, before ``args`` change them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["PRESETS", "with_preset"]

_KL_IN_REWARD = {"kl_in": "reward", "kl_estimator": "k1"}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    # GRPO (DeepSeekMath, arXiv:2402.03300): each sequence counts the same. The paper has kl_coef 0.04.
    "grpo": {"loss": {"type": "clipped", "aggregation": "sequence_mean"}},
    # Dr. GRPO (arXiv:2503.20783): no division by standard deviation or length. Set loss.aggregation.fixed_length to
    # the most tokens of a completion.
    "dr_grpo": {
        "advantage": {"type": "dr_grpo"},
        "loss": {"type": "clipped", "aggregation": {"fixed_length": 1024}},
    },
    # DAPO (arXiv:2503.14476): clip-higher, token mean, no groups without signal; `overlong` as the completions need.
    "dapo": {"loss": {"type": "clipped", "clip_high": 0.28}, "drop_equal_groups": True},
    # GSPO (arXiv:2507.18071): ratios and clipping for each sequence.
    "gspo": {"loss": {"type": "gspo"}},
    # CISPO (MiniMax-M1, arXiv:2506.13585): clipped weights, and a gradient for every token.
    "cispo": {"loss": {"type": "cispo"}},
    # RLOO (arXiv:2402.14740): against the others of the group, a completion as one action, KL in the reward.
    "rloo": {**_KL_IN_REWARD, "advantage": {"type": "rloo"}, "loss": {"type": "sequence_clipped"}},
    # REINFORCE++ (arXiv:2501.03262): whitened over the batch, clipped, KL in the reward of each token.
    "reinforce_plus_plus": {**_KL_IN_REWARD, "advantage": {"type": "reinforce_plus_plus"}},
    # ReMax (arXiv:2310.10505): REINFORCE against the greedy completion, KL in the reward.
    "remax": {**_KL_IN_REWARD, "advantage": {"type": "remax"}, "loss": {"type": "reinforce"}},
    # PPO (arXiv:1707.06347) as in InstructGPT (arXiv:2203.02155): GAE with a critic, whitened, KL in the reward.
    "ppo": {**_KL_IN_REWARD, "advantage": {"type": "gae"}, "whiten_advantages": True},
}


def with_preset(name: str, args: Mapping[str, Any]) -> dict[str, Any]:
    """``args`` over the settings of the preset ``name``; a section without ``type`` changes single fields of it."""
    preset = PRESETS.get(name, {})
    merged = {**preset, **args}
    for section in ("advantage", "loss"):
        own = args.get(section)
        if isinstance(own, Mapping) and "type" not in own:
            merged[section] = {**preset.get(section, {}), **own}
    return merged
