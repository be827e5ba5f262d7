"""The kinds of training data: prompts, sequences to imitate, and pairs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from core_rl.errors import BatchError
from core_rl_trainer.data.encoding import (
    encode_completion,
    encode_demonstration,
    encode_prompt,
    refuse_open_turn,
)
from core_rl_trainer.data.examples import (
    Example,
    ExampleCheck,
    check_demonstration,
    check_preference,
    check_prompt,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["DEMONSTRATIONS", "PREFERENCES", "PROMPTS", "ExampleKind", "Sample", "Size"]

Sample = Mapping[str, Any]
"""What a loop gets of an example."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """The tokens of a sample."""

    longest: int
    """Of its longest sequence."""
    unit: int
    """Of all its sequences, which stay in one micro-batch."""


@dataclass(frozen=True, kw_only=True)
class ExampleKind:
    """What an example of some kind has, and what becomes of it."""

    name: Literal["prompts", "demonstrations", "preferences"]
    noun: str
    """Of one of them, in messages."""
    needs: str
    """Its fields, in messages."""
    fields: tuple[str, ...]
    """Those that it has as a rule."""
    check: ExampleCheck
    encode: Callable[[PreTrainedTokenizerBase, Example], Sample]
    """Raises `BatchError` or `ConfigError` about the example."""
    size: Callable[[Sample], Size]
    is_tie: Callable[[Sample], bool] = lambda _: False
    """Whether both sequences of a pair are equal, so that nothing can be learned from it."""


def _encode_prompt(tokenizer: PreTrainedTokenizerBase, example: Example) -> Sample:
    refuse_open_turn(example["prompt"])
    ids = encode_prompt(tokenizer, example["prompt"], example.get("tools"))
    if not ids:
        raise BatchError("the prompt has no tokens; remove it or check the tokenizer")
    return {**example, "prompt_ids": ids}


def _encode_demonstration(tokenizer: PreTrainedTokenizerBase, example: Example) -> Sample:
    ids, mask = encode_demonstration(tokenizer, example)
    return {"input_ids": ids, "loss_mask": mask}


def _encode_pair(tokenizer: PreTrainedTokenizerBase, example: Example) -> Sample:
    return {
        name: encode_completion(tokenizer, example["prompt"], example[name], example.get("tools"))
        for name in ("chosen", "rejected")
    }


def _size_of_pair(sample: Sample) -> Size:
    lengths = [len(sample[name][0]) for name in ("chosen", "rejected")]
    return Size(longest=max(lengths), unit=sum(lengths))


def _size_of(name: str) -> Callable[[Sample], Size]:
    return lambda sample: Size(longest=len(sample[name]), unit=len(sample[name]))


PROMPTS = ExampleKind(
    name="prompts",
    noun="prompt",
    needs="a 'prompt'",
    fields=("prompt",),
    check=check_prompt,
    encode=_encode_prompt,
    size=_size_of("prompt_ids"),
)
"""Prompts of rollouts: the example with its ``prompt_ids``."""

DEMONSTRATIONS = ExampleKind(
    name="demonstrations",
    noun="example",
    needs="a 'prompt' and an 'answer', or 'messages',",
    fields=("prompt", "answer"),
    check=check_demonstration,
    encode=_encode_demonstration,
    size=_size_of("input_ids"),
)
"""Sequences to imitate: ``input_ids`` and ``loss_mask``."""

PREFERENCES = ExampleKind(
    name="preferences",
    noun="example",
    needs="a 'prompt', 'chosen' and 'rejected'",
    fields=("prompt", "chosen", "rejected"),
    check=check_preference,
    encode=_encode_pair,
    size=_size_of_pair,
    is_tie=lambda sample: sample["chosen"] == sample["rejected"],
)
"""Pairs: ``chosen`` and ``rejected``, each token ids and mask."""
