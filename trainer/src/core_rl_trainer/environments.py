"""Environments, which reply to the model between its turns: token ids in, token ids out. Tools on text."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from core_rl.errors import RolloutError
from core_rl_trainer.data.pieces import continuation_ids, decoded
from core_rl_trainer.rewards.calls import call_user, name_of
from core_rl_trainer.rewards.text import completion_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Environment", "Observation", "Tool", "ToolEnvironment", "continuation_ids"]


@dataclass(frozen=True, kw_only=True)
class Observation:
    """The reply of an environment to one completion."""

    ids: tuple[int, ...] = ()
    """Tokens that the model sees next, such as the result of a tool; not used when ``done``."""
    reward: float = 0.0
    """For this completion; the rewards of an episode are added up."""
    done: bool = False
    """Whether the episode ends here."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", tuple(self.ids))


class Environment(Protocol):
    """The environment of one episode; each episode has an object of its own.

    It exists so that tools, games and simulated users need no workflow of their own. It sees and returns tokens
    and never the transcript: the workflow keeps that, so that no token is ever encoded twice.
    """

    async def reset(self, data: Mapping[str, Any]) -> Sequence[int]:
        """Begin with a sample of the data; returns the prompt, the same for the same sample."""

    async def step(self, output_ids: Sequence[int]) -> Observation:
        """Take one whole completion of the model, its stop token included."""

    async def close(self) -> None:
        """Free the resources of the episode. Called once, also after an error."""


class Tool(Protocol):
    """Replies to the text of a completion, or returns None where it calls no tool: that completion is the last one.

    ``sample`` is the line of the JSONL file. May be a coroutine function; a plain one runs in a thread.
    """

    def __call__(
        self, completion: str, sample: Mapping[str, Any], /
    ) -> str | Awaitable[str | None] | None: ...


class ToolEnvironment:
    """The prompt of a sample, and a tool that replies until a completion does not call it.

    Only the tool's replies are encoded, by `continuation_ids`; the model's tokens stay as they are. There are
    no rewards: those are for a reward function, which scores the last completion. With ``skip_special_tokens=False``
    the tool sees special tokens, such as ``<tool_call>``; see `core_rl_trainer.rewards.text.completion_text`.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, tool: Tool, skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._tool = tool
        self._skip_special_tokens = skip_special_tokens
        self._sample: Mapping[str, Any] = {}

    async def reset(self, data: Mapping[str, Any]) -> Sequence[int]:
        self._sample = data
        prompt: Sequence[int] = data["prompt_ids"]
        return prompt

    async def step(self, output_ids: Sequence[int]) -> Observation:
        completion = completion_text(self._tokenizer, output_ids, self._skip_special_tokens)
        reply = await call_user(self._tool, completion, self._sample)
        if reply is None:
            return Observation(done=True)
        if not isinstance(reply, str):
            raise RolloutError(
                f"the tool {name_of(self._tool)} returned {reply!r}, and neither text nor None"
            )
        before = decoded(self._tokenizer, output_ids)
        return Observation(ids=tuple(continuation_ids(self._tokenizer, before, reply)))

    async def close(self) -> None:
        """There are no resources to free."""
