"""Environments in the style of ``verifiers`` 0.1: chat messages in and out, and a rubric of weighted rewards.

Nothing of the library is imported: an object with these methods is enough, and its ``MultiTurnEnv`` is one.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from core_rl.errors import BatchError, RolloutError
from core_rl_trainer.data.chat_template import ChatFormat
from core_rl_trainer.data.encoding import encode_prompt, ended_ids
from core_rl_trainer.data.pieces import continuation_ids, decoded
from core_rl_trainer.data.tokenizers import all_end_tokens
from core_rl_trainer.environments import Observation
from core_rl_trainer.rewards.calls import call_user, guarded, name_of
from core_rl_trainer.rewards.functions import as_reward
from core_rl_trainer.rewards.text import completion_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]
State = dict[str, Any]


class Rubric(Protocol):
    """Reward functions and their weights. A function names its inputs: ``completion``, ``answer``, ``state``, …"""

    funcs: Sequence[Callable[..., Any]]
    weights: Sequence[float]


class MessageEnvironment(Protocol):
    """The part of ``verifiers.MultiTurnEnv`` that is used; one object serves all episodes, each with a state."""

    rubric: Rubric

    async def setup_state(self, state: State) -> Any:
        """Fill the state of an episode; its new keys stay."""

    async def env_response(self, messages: list[Message], state: State) -> Sequence[Message] | str:
        """The reply to the conversation so far."""

    def is_completed(self, state: State) -> Awaitable[bool]:
        """Whether the episode is over. Asked after each completion, and after each reply."""


def verifiers_examples(rows: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Rows of an environment's ``dataset`` as lines of a JSONL file; a ``question`` becomes the ``prompt``."""
    for row in rows:
        fields = dict(row)
        if "prompt" not in fields:
            fields["prompt"] = fields.pop("question")
        yield fields


class VerifiersEnvironment:
    """An episode of a `MessageEnvironment`: tokens for the model, messages for the environment.

    Tokens of the model are never encoded again. Replies go through the tokenizer's chat template, or are plain text
    where the prompt is one; ``template_args`` come from ``data.template_args``. The reward is the weighted sum of
    the rubric, at the end; metrics of it have the weight 0.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        environment: MessageEnvironment,
        skip_special_tokens: bool = True,
        template_args: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._tokenizer = tokenizer
        ends = all_end_tokens(tokenizer)
        self._chat_format = ChatFormat(tokenizer=tokenizer, arguments=template_args, ends=ends)
        self._environment = environment
        self._skip_special_tokens = skip_special_tokens
        self._state: State = {}

    async def reset(self, data: Mapping[str, Any]) -> Sequence[int]:
        prompt = data["prompt"]
        self._plain = isinstance(prompt, str)
        messages = [{"role": "user", "content": prompt}] if self._plain else list(prompt)
        self._state = {
            "prompt": messages,
            "completion": [],
            "trajectory": [],
            "answer": data.get("answer", ""),
            "info": data.get("info", {}),
            "task": data.get("task", "default"),
            "input": dict(data),
        }
        state = await call_user(self._environment.setup_state, self._state)
        self._state = state if isinstance(state, dict) else self._state
        ids: Sequence[int] = data["prompt_ids"]
        return ids

    async def step(self, output_ids: Sequence[int]) -> Observation:
        text = completion_text(self._tokenizer, output_ids, self._skip_special_tokens)
        turn = {"prompt": self._messages(), "completion": [{"role": "assistant", "content": text}]}
        self._state["trajectory"].append(turn)
        self._state["completion"].extend(turn["completion"])
        if await call_user(self._environment.is_completed, self._state):
            return Observation(done=True, reward=await self._score())
        response = await call_user(self._environment.env_response, self._messages(), self._state)
        reply = [{"role": "user", "content": response}] if isinstance(response, str) else list(response)
        ids = self._encoded(reply, output_ids)
        self._state["completion"].extend(reply)
        if await call_user(self._environment.is_completed, self._state):
            return Observation(done=True, reward=await self._score())
        return Observation(ids=tuple(ids))

    def _messages(self) -> list[Message]:
        return [*self._state["prompt"], *self._state["completion"]]

    def _encoded(self, reply: Sequence[Message], output_ids: Sequence[int]) -> list[int]:
        """The tokens between ``output_ids`` and the next turn of the model; an end token first if they have none."""
        if self._plain:
            text = "".join(str(message["content"]) for message in reply)
            return continuation_ids(self._tokenizer, decoded(self._tokenizer, output_ids), text)
        example, messages = self._state["input"], self._messages()
        before = ended_ids(self._chat_format, messages, example)
        after = encode_prompt(self._chat_format, [*messages, *reply], example)
        if after[: len(before)] != before:
            raise BatchError(
                "the chat template rewrites earlier turns; give the environment's prompts as texts"
            )
        return after[len(before) - (output_ids[-1] not in self._chat_format.ends) :]

    async def _score(self) -> float:
        """The weighted sum of the rubric's rewards that apply. Raises `RolloutError` where none of them does."""
        rubric = self._environment.rubric
        values = [await self._value(function) for function in rubric.funcs]
        if values and all(value is None for value in values):
            raise RolloutError(
                f"no reward applies: None was returned by {', '.join(map(name_of, rubric.funcs))}\n"
                "fix: return a number from any, or leave the example out"
            )
        pairs = zip(values, rubric.weights, strict=True)
        return sum(weight * value for value, weight in pairs if value is not None)

    async def _value(self, function: Callable[..., Any]) -> float | None:
        """Value of ``function``, called with the values that its parameters name; None where it does not apply."""
        known = {
            **{name: self._state[name] for name in ("prompt", "completion", "answer", "info", "task")},
            "state": self._state,
            "parser": getattr(self._environment.rubric, "parser", None),
        }
        parameters = inspect.signature(function).parameters
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            known = {name: value for name, value in known.items() if name in parameters}
        subject = f"the rubric's function {name_of(function)}"
        value = await guarded(call_user(partial(function, **known)), subject=subject, function=function)
        return None if value is None else as_reward(value, subject, function)

    async def close(self) -> None:
        """There are no resources to free."""
