"""A greedy answer beside the sampled ones: ReMax's baseline."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from core_rl.data.batch import SequenceBatch
from core_rl.rollout.workflow import RolloutWorkflow, TokenGenerator

__all__ = ["GreedyBaselineWorkflow"]


@dataclass(frozen=True, kw_only=True)
class GreedyBaselineWorkflow:
    """The sequences of ``sampled``, each with the reward of ``greedy`` as ``baseline_rewards [B]``.

    ReMax (arXiv:2310.10505) compares with the greedy answer of the same weights. A sample is rejected
    when either workflow rejects it.
    """

    sampled: RolloutWorkflow
    greedy: RolloutWorkflow
    """Makes one sequence."""

    async def arun_episode(
        self, engine: TokenGenerator, data: Mapping[str, Any], episode: int
    ) -> SequenceBatch | None:
        """The sequences of one sample; the greedy one is not among them."""
        batch, baseline = await asyncio.gather(
            self.sampled.arun_episode(engine, data, episode), self.greedy.arun_episode(engine, data, episode)
        )
        if batch is None or baseline is None:
            return None
        return batch.with_sequences(
            baseline_rewards=baseline["rewards"][:1].expand(batch.num_sequences).clone()
        )
