"""Tasks of reasoning-gym: examples that it generates, and rewards that it computes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from core_rl.errors import ConfigError, RolloutError
from core_rl_trainer.environments import Observation
from core_rl_trainer.rewards.calls import call_user
from core_rl_trainer.rewards.text import completion_text

try:
    import reasoning_gym
    from reasoning_gym.utils import extract_answer
except ImportError as _missing:
    raise ConfigError(
        f'it needs reasoning-gym, which cannot be imported ({_missing}); pip install "core-rl-trainer[reasoning-gym]"'
    ) from _missing

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["ReasoningGymEnvironment", "reasoning_gym_examples"]


def reasoning_gym_examples(
    name: str, *, size: int, seed: int, settings: Mapping[str, Any] | None = None
) -> Iterator[dict[str, Any]]:
    """``size`` examples of the task ``name``, for a JSONL file: ``prompt``, ``answer`` and ``metadata``.

    ``settings`` are fields of the task's config. Raises `ConfigError` for a task or a setting that there is not.
    """
    try:
        entries = reasoning_gym.create_dataset(name, size=size, seed=seed, **(settings or {}))
    except (ValueError, TypeError, AssertionError) as error:
        raise ConfigError(f"reasoning-gym task {name!r}: {error}") from error
    for number in range(size):
        entry = entries[number]
        yield {"prompt": entry["question"], "answer": entry["answer"], "metadata": entry["metadata"]}


class ReasoningGymEnvironment:
    """One turn: a question of reasoning-gym, and the score that its task gives the completion.

    The answer is what stands in ``<answer>`` tags, or the whole completion where there are none.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._entry: dict[str, Any] = {}

    async def reset(self, data: Mapping[str, Any]) -> Sequence[int]:
        if "source_dataset" not in data.get("metadata", {}):
            raise RolloutError(
                "a sample has no 'metadata.source_dataset'\nfix: write the data with reasoning_gym_examples()"
            )
        self._entry = {**data, "question": data["prompt"]}
        prompt: Sequence[int] = data["prompt_ids"]
        return prompt

    async def step(self, output_ids: Sequence[int]) -> Observation:
        completion = completion_text(self._tokenizer, output_ids, self._skip_special_tokens)
        score = reasoning_gym.get_score_answer_fn(self._entry["metadata"]["source_dataset"])
        reward = await call_user(score, extract_answer(completion) or completion.strip(), self._entry)
        return Observation(reward=reward, done=True)

    async def close(self) -> None:
        """There are no resources to free."""
