"""Completions that are given, so that trainers are compared and not what draws the completions."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from common.workload import MODEL, skewed_lengths
from core_rl.data.batch import SequenceBatch

GRPOPhases = dict[str, float]
"""Seconds of ``logprobs``, of ``update`` and of ``other``."""
LOGPROB = -9.0
"""Log-prob of each completion token, about as with an untrained model over 8,192 tokens."""


@dataclass(frozen=True)
class Rollout:
    """Groups of completions, in order: those to prompt ``i`` are at ``i * group`` and behind it."""

    prompts: list[list[int]]
    completions: list[list[int]]
    group: int

    @property
    def tokens(self) -> int:
        """Prompts, which each of their completions repeats, and completions."""
        return self.group * sum(map(len, self.prompts)) + sum(map(len, self.completions))


def given_rollout(prompts: int, group: int, prompt_tokens: int) -> Rollout:
    """``prompts * group`` random completions of skewed lengths."""
    random = torch.Generator().manual_seed(0)

    def draw(length: int) -> list[int]:
        return torch.randint(2, MODEL["vocab_size"], (length,), generator=random).tolist()

    return Rollout(
        prompts=[draw(prompt_tokens) for _ in range(prompts)],
        completions=[draw(length) for length in skewed_lengths(prompts * group)],
        group=group,
    )


def reward_of(completion: list[int]) -> float:
    """Any function of the completion that differs within a group."""
    return (len(completion) % 7) / 7


def packed_rollout(rollout: Rollout) -> SequenceBatch:
    """The rollout as a workflow of core-rl hands it over."""
    rows, masks = [], []
    for number, completion in enumerate(rollout.completions):
        prompt = rollout.prompts[number // rollout.group]
        rows.append(prompt + completion)
        masks.append([False] * len(prompt) + [True] * len(completion))
    groups = torch.arange(len(rollout.prompts)).repeat_interleave(rollout.group)
    batch = SequenceBatch.from_sequences(rows, tokens={"loss_mask": masks})
    rewards = torch.tensor([reward_of(completion) for completion in rollout.completions])
    batch = batch.with_tokens(logprobs=torch.where(batch.loss_mask, LOGPROB, 0.0))
    return replace(batch.with_sequences(rewards=rewards, group=groups), unit=groups)


def word_tokenizer() -> PreTrainedTokenizerFast:
    """A word for each token: ``w0`` pads, ``w1`` ends."""
    words = [f"w{number}" for number in range(MODEL["vocab_size"])]
    padding, end = words[:2]
    ids = {word: number for number, word in enumerate(words)}
    split = Tokenizer(models.WordLevel(ids, unk_token=padding))
    split.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=split, pad_token=padding, eos_token=end)
