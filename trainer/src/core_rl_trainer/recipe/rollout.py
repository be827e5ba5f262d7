"""The section ``rollout`` of a recipe."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from core_rl.backend.meta import SyncMethod
from core_rl.config.base import Config

__all__ = ["RolloutSection"]


class RolloutSection(Config):
    """The generation of completions."""

    engine: str = "reference-rollout"
    """The inference engine."""
    prompts_per_step: int = Field(default=16, ge=1)
    """Prompts of one training step."""
    group_size: int = Field(default=8, ge=1)
    """Completions of each prompt; GRPO compares their rewards with each other."""
    max_new_tokens: int = Field(default=64, ge=1)
    """The most tokens of one completion."""
    temperature: float = Field(default=1.0, gt=0.0)
    """Of the sampling, and of the log-probs that the train engine computes."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Draw from the smallest set of tokens with this probability; 1 keeps all."""
    top_k: int | None = Field(default=None, ge=1)
    """Draw from this many of the most likely tokens; null keeps all."""
    timeout_s: float = Field(default=600.0, gt=0.0)
    """The time limit of the completions of one batch of prompts, in seconds."""
    sync: SyncMethod = "disk"
    """How new weights reach the rollout engine: in files below ``output_dir``, through shared memory (``tensor``), or
    over a process group with the ranks of its servers (``distributed``). ``lora`` sends the adapter of ``model.lora``
    alone; the others send weights with an adapter merged into them."""
    max_head_offpolicyness: int = Field(default=0, ge=0)
    """0 trains synchronously: completions come from the newest weights. Above 0 it trains asynchronously: the next
    completions are generated meanwhile, from weights that are at most this many versions older."""
    max_concurrent_rollouts: int = Field(default=256, ge=1)
    """Prompts that are completed at one time."""
    should_accept: str | None = None
    """``module:function`` or ``file.py:function``, called with the batch of one prompt's completions. False replaces
    them by those of another prompt. ``core_rl_trainer.rewards.functions:rewards_differ`` leaves out groups without
    a signal, as DAPO (arXiv:2503.14476) does."""
    reward_timeout_s: float | None = Field(default=None, gt=0.0)
    """The time limit of the reward of one completion, in seconds; null for none."""
    reward_processes: int = Field(default=0, ge=0)
    """Compute rewards in this many processes, where one that takes longer than ``reward_timeout_s`` is killed;
    0 computes them in threads, where it is only given up."""
    environment: str | None = None
    """``module:function`` or ``file.py:function``, called with the tokenizer for each episode: makes the
    `Environment` that replies to the model between its turns, such as a `ToolEnvironment`. Null: one turn."""
    max_turns: int = Field(default=4, ge=1)
    """With an environment: the most completions of one episode."""
    step_timeout_s: float | None = Field(default=None, gt=0.0)
    """With an environment: the time limit of one of its replies, in seconds; null for none."""

    @model_validator(mode="after")
    def _killed_when(self) -> Self:
        if self.reward_processes and self.reward_timeout_s is None:
            raise ValueError("reward_processes needs reward_timeout_s: after how long a process is killed")
        return self
