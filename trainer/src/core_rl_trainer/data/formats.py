"""Formats of other systems, recognised by the fields of an example."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from core_rl.errors import BatchError
from core_rl_trainer.data.examples import Example
from core_rl_trainer.data.kinds import ExampleKind

__all__ = ["Format", "recognised_format"]


@dataclass(frozen=True, kw_only=True)
class Format:
    """A format of another system."""

    name: str
    recognises: Callable[[Example], bool]
    convert: Callable[[Example], Example]
    """The fields that replace those of the example, or are added to them. Raises `BatchError` without a subject."""


def _has(*names: str, without: Sequence[str] = ()) -> Callable[[Example], bool]:
    return lambda example: (
        all(example.get(name) is not None for name in names)
        and all(example.get(name) is None for name in without)
    )


def _is_verl(example: Example) -> bool:
    rewarded = example.get("reward_model")
    return "prompt" in example and isinstance(rewarded, Mapping) and "ground_truth" in rewarded


def _from_verl(example: Example) -> Example:
    """The answer to compare with, unless there is one; everything else is there for the reward function."""
    return {"answer": example.get("answer", example["reward_model"]["ground_truth"])}


ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant"}


def _from_sharegpt(example: Example) -> Example:
    turns = [turn if isinstance(turn, Mapping) else {} for turn in example["conversations"]]
    return {
        "messages": [
            {"role": ROLES.get(turn.get("from", ""), turn.get("from")), "content": turn.get("value")}
            for turn in turns
        ]
    }


def _with_implicit_prompt(example: Example) -> Example:
    """The beginning that both completions share is the prompt, as in TRL's ``extract_prompt``.

    Turns of the assistant at its end belong to the completions. Raises `BatchError` where there is no beginning, or
    where a text ``prompt`` is no turn of it.
    """
    first, second, prompt = example["chosen"], example["rejected"], example.get("prompt")
    same = _common_length(first, second)
    if isinstance(first, str):
        same -= bool(same) and (
            first == second or first[same - 1] == " "
        )  # the blank before a word belongs to it
        return {"prompt": first[:same], "chosen": first[same:], "rejected": second[same:]}
    while same and isinstance(first[same - 1], Mapping) and first[same - 1].get("role") == "assistant":
        same -= 1
    if not same:
        raise BatchError("has conversations as 'chosen' and 'rejected' that do not begin with the same turns")
    if isinstance(prompt, str) and prompt.strip() not in _user_texts(first[:same]):
        raise BatchError(
            f"has a 'prompt' that is no turn of the user at the beginning of 'chosen' and 'rejected': {prompt!r}; "
            "correct it, or leave the column out"
        )
    return {"prompt": first[:same], "chosen": first[same:], "rejected": second[same:]}


def _common_length(first: Sequence[object], second: Sequence[object]) -> int:
    pairs = zip(first, second, strict=False)
    shorter = min(len(first), len(second))
    return next((n for n, (left, right) in enumerate(pairs) if left != right), shorter)


def _user_texts(turns: Sequence[object]) -> list[str]:
    """The texts of the user's turns, without blanks around them."""
    users = [turn for turn in turns if isinstance(turn, Mapping) and turn.get("role") == "user"]
    return [str(turn.get("content")).strip() for turn in users]


def _are_whole_conversations(example: Example) -> bool:
    """Whether ``chosen`` and ``rejected`` are lists of turns that contain the prompt, and not its continuations."""
    prompt, completions = example.get("prompt"), [example.get("chosen"), example.get("rejected")]
    if not all(isinstance(turns, list) and turns for turns in completions):
        return False
    if isinstance(prompt, list):
        return bool(prompt) and all(turns[: len(prompt)] == prompt for turns in completions if turns)
    return isinstance(prompt, str)


FORMATS: Mapping[str, tuple[Format, ...]] = {
    "prompts": (Format(name="verl", recognises=_is_verl, convert=_from_verl),),
    "demonstrations": (
        Format(
            name="TRL prompt-completion",
            recognises=_has("prompt", "completion", without=("answer", "messages", "label")),
            convert=lambda example: {"answer": example["completion"]},
        ),
        Format(
            name="TRL language modeling",
            recognises=_has("text", without=("prompt", "messages")),
            convert=lambda _: {},
        ),
        Format(
            name="ShareGPT",
            recognises=_has("conversations", without=("prompt", "messages")),
            convert=_from_sharegpt,
        ),
    ),
    "preferences": (
        Format(
            name="TRL preference with an implicit prompt",
            recognises=_has("chosen", "rejected", without=("prompt",)),
            convert=_with_implicit_prompt,
        ),
        Format(
            name="preference with whole conversations",
            recognises=_are_whole_conversations,
            convert=_with_implicit_prompt,
        ),
    ),
}
"""By kind of examples."""


def recognised_format(example: Example, kind: ExampleKind) -> Format | None:
    """The format of another system that ``example`` has; None for the one that is used here."""
    return next((found for found in FORMATS[kind.name] if found.recognises(example)), None)
