"""Expected tokens of greedy decoding, from the oracle."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from core_rl_oracle.float64 import float64_only
from core_rl_oracle.oracle import Oracle

__all__ = ["STEPS", "GreedyPath", "find_path"]

STEPS = 8
"""Tokens of a path."""
PROMPTS = 512


@dataclass(frozen=True, kw_only=True)
class GreedyPath:
    """A prompt and the most likely tokens after it."""

    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    stops: tuple[int, int]
    """Two tokens of ``ids``, each in the order of its first place, neither of them at the first place."""

    def until(self, stops: Collection[int]) -> tuple[int, ...]:
        """The answer that ends with the first of ``stops``; all of ``ids`` where there is none."""
        end = next((place + 1 for place, token in enumerate(self.ids) if token in stops), len(self.ids))
        return self.ids[:end]


def find_path(oracle: Oracle, vocab_size: int, seed: int) -> GreedyPath:
    """Of many prompts the one where the most likely token wins most clearly at every step.

    So that an engine in a smaller dtype takes the same tokens. Raises `ValueError` if no path has two
    tokens to stop at.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab_size, (PROMPTS, 3), generator=generator)
    margins = []
    with torch.no_grad(), float64_only():
        for _ in range(STEPS):
            logits = oracle.model(input_ids=ids, use_cache=False).logits[:, -1]
            best = logits.topk(2)
            margins.append(best.values[:, 0] - best.values[:, 1])
            ids = torch.cat([ids, best.indices[:, :1]], dim=1)
    clearest = torch.stack(margins).min(0).values.argsort(descending=True).tolist()
    for index in clearest:
        prompt, path = tuple(ids[index, :3].tolist()), tuple(ids[index, 3:].tolist())
        new = [place for place, token in enumerate(path) if token not in path[:place] and place]
        if len(new) > 1 and new[0] < STEPS - 2:
            return GreedyPath(prompt=prompt, ids=path, stops=(path[new[0]], path[new[-1]]))
    raise ValueError(f"none of {PROMPTS} prompts leads to three different tokens in {STEPS} steps")
