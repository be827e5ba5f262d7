"""The section ``rollout`` of a recipe."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from core_rl.backend.meta import SyncMethod
from core_rl.config.base import Config
from core_rl.config.paths import ImportPath
from core_rl.data.requests import SamplingParams


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
    """Temperature of the sampling, and of the train engine's log-probs."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Draw from the smallest set of tokens with this probability; 1 keeps all."""
    top_k: int | None = Field(default=None, ge=1)
    """Draw from this many of the most likely tokens; null keeps all."""
    min_p: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Draw from the tokens that are at least this fraction as likely as the most likely one; 0 keeps all."""
    repetition_penalty: float = Field(default=1.0, gt=0.0, allow_inf_nan=False)
    """Make tokens that the completion already has less likely, above 1, by scaling their logits."""
    presence_penalty: float = Field(default=0.0, allow_inf_nan=False)
    """Subtracted from the logits of tokens that the completion already has."""
    logit_bias: dict[int, float] = Field(default_factory=dict)
    """Added to the logits of these token ids."""
    off_distribution: Literal["refuse", "warn"] = "refuse"
    """The treatment of ``top_p``, ``top_k``, ``min_p``, penalties and ``logit_bias``, with which completions come from
    another distribution than the log-probs that are trained on: an error, or a warning."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion, which includes them."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a completion, in addition to the model's."""
    timeout_s: float = Field(default=600.0, gt=0.0)
    """The time limit of the completions of one batch of prompts, in seconds, without that of their rewards."""
    sync: SyncMethod = "disk"
    """Weight sync to the rollout engine: in files below ``output_dir``, through shared memory (``tensor``), or
    over a process group with the ranks of its servers (``distributed``). ``lora`` sends the adapter of ``model.lora``
    alone; the others send weights with an adapter merged into them."""
    sync_delta: bool = False
    """Send only the values that changed since the previous sync, bit for bit, and all of them where the rollout engine
    has other weights. In bfloat16 a step at a learning rate of 1e-6 changes a few per cent. Both sides keep a copy of
    the weights in host memory."""
    max_head_offpolicyness: int = Field(default=0, ge=0)
    """0 trains synchronously: completions come from the newest weights. Above 0 it trains asynchronously: the next
    completions are generated meanwhile, from weights that are at most this many versions older."""
    max_concurrent_rollouts: int = Field(default=256, ge=1)
    """Prompts that are completed at one time."""
    should_accept: ImportPath | None = None
    """``module:function`` or ``file.py:function``, called with the batch of one prompt's completions, before the scores
    of a reward model. False replaces them by completions of another prompt.
    ``core_rl_trainer.rewards.functions:rewards_differ`` leaves out groups without a signal, as DAPO (arXiv:2503.14476)
    does."""
    reward_timeout_s: float | None = Field(default=None, gt=0.0)
    """The time limit of one call of a reward, in seconds; null for that of ``timeout_s``."""
    reward_processes: int = Field(default=0, ge=0)
    """Compute rewards in this many processes, which are killed after ``reward_timeout_s``;
    0 computes them in threads, where it is only given up."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text of completions that rewards get. False keeps them, such as a ``<think>``
    that is a special token; an end token at the end of a completion is left out in any case."""
    environment: ImportPath | None = None
    """``module:function`` or ``file.py:function``, called with the tokenizer for each episode: makes the
    `Environment` that replies to the model between its turns, such as a `ToolEnvironment`. Null: one turn."""
    max_turns: int = Field(default=4, ge=1)
    """With an environment: the most completions of one episode."""
    step_timeout_s: float | None = Field(default=None, gt=0.0)
    """With an environment: the time limit of each reply, in seconds; null for ``timeout_s``."""

    def sampling(self) -> SamplingParams:
        """The sampling of training. Raises `ConfigError` for values that it cannot have."""
        names = {field.name for field in fields(SamplingParams)} & type(self).model_fields.keys()
        values: dict[str, Any] = {name: getattr(self, name) for name in names}
        return SamplingParams(**values | {"logit_bias": tuple(self.logit_bias.items())})

    @property
    def logits_are_changed(self) -> bool:
        """Whether log-probs of completions are of other logits than the model's."""
        return bool(self.logit_bias) or self.repetition_penalty != 1.0 or self.presence_penalty != 0.0

    @property
    def reward_limit_s(self) -> float:
        """The time limit of the reward of one completion, in seconds."""
        return self.reward_timeout_s or self.timeout_s

    @property
    def step_limit_s(self) -> float:
        """The time limit of one reply of the environment, in seconds."""
        return self.step_timeout_s or self.timeout_s

    @property
    def batch_limit_s(self) -> float:
        """Time limit for a batch, in seconds: longer than the limits of user code, whose errors name it."""
        return self.timeout_s + max(self.reward_limit_s, self.step_limit_s if self.environment else 0.0)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.sync_delta and self.sync == "lora":
            raise ValueError(
                "sync_delta = true with sync = 'lora': an adapter is sent whole; set sync_delta to false"
            )
        if self.reward_processes and self.reward_timeout_s is None:
            raise ValueError("reward_processes needs reward_timeout_s: after how long a process is killed")
        return self
