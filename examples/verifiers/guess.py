"""An environment in the style of ``verifiers``: the model guesses a sum, and may try again. It needs no network.

    python examples/verifiers/guess.py   # writes runs/guess/train.jsonl and eval.jsonl

With the library installed, ``Guess`` may as well be a ``verifiers.MultiTurnEnv`` with a ``verifiers.Rubric``.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core_rl_trainer.integrations import verifiers
from core_rl_trainer.integrations.verifiers import VerifiersEnvironment, verifiers_examples

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Message = Mapping[str, Any]


def last_guess(completion: Sequence[Message]) -> int | None:
    """The number that the model wrote last."""
    match = re.findall(r"\d+", completion[-1]["content"])
    return int(match[-1]) if match else None


def is_right(completion: Sequence[Message], answer: str) -> float:
    """1 for the right sum."""
    return float(last_guess(completion) == int(answer))


async def at_once(state: dict[str, Any]) -> float:
    """1 for an episode of one turn."""
    return float(len(state["trajectory"]) == 1)


@dataclass
class Rubric:
    """Rewards of an episode, and their weights."""

    funcs: Sequence[Callable[..., Any]] = (is_right, at_once)
    weights: Sequence[float] = (1.0, 0.1)


class Guess:
    """Two guesses for each sum; the question is repeated after a wrong one."""

    rubric: verifiers.Rubric = Rubric()

    async def setup_state(self, state: dict[str, Any]) -> None:
        """Nothing to prepare."""

    async def is_completed(self, state: dict[str, Any]) -> bool:
        """After a right guess, or two."""
        ends_with_model = state["completion"][-1]["role"] == "assistant"
        right = ends_with_model and last_guess(state["completion"]) == int(state["answer"])
        return right or (len(state["trajectory"]) == 2 and ends_with_model)

    async def env_response(self, messages: list[Message], state: dict[str, Any]) -> list[Message]:
        """The question again."""
        return [{"role": "user", "content": state["prompt"][-1]["content"]}]

    def dataset(self, size: int, seed: int) -> list[dict[str, Any]]:
        """Questions and their answers."""
        draw = random.Random(seed)
        pairs = [(draw.randrange(100), draw.randrange(100)) for _ in range(size)]
        return [{"question": f"{a}+{b}=", "answer": f"{a + b:03d}"} for a, b in pairs]


GUESS = Guess()


def guess_environment(tokenizer: PreTrainedTokenizerBase) -> VerifiersEnvironment:
    """One episode, for ``rollout.environment``."""
    return VerifiersEnvironment(tokenizer, GUESS)


def main() -> None:
    """Write the data."""
    output = Path("runs/guess")
    output.mkdir(parents=True, exist_ok=True)
    for name, size, seed in (("train", 512, 0), ("eval", 64, 1)):
        lines = [json.dumps(row) + "\n" for row in verifiers_examples(GUESS.dataset(size, seed))]
        (output / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
