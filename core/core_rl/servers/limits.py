"""`ServerLimits`: requests and updates that a server without core-rl's part of its product would get wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from core_rl.backend.meta import SyncMethod
from core_rl.data.requests import SamplingParams


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """Limits of a server; by default there are none."""

    temperatures: tuple[float, float] = (0.0, math.inf)
    """The lowest and the highest positive temperature."""
    full_distribution: bool = True
    """Whether log-probs describe the distribution before top-k, top-p and min-p cut it."""
    refused: Mapping[SyncMethod, str] = field(default_factory=dict)
    """Methods of weight sync that it lacks, with the reasons."""
    updates_tied_heads: bool = True
    """Whether new weights of the embedding by ``disk`` reach a head that shares them."""
    remedy: str = ""
    """The way to a server without these limits."""

    def sampling_problem(self, sampling: SamplingParams) -> str | None:
        """The reason for which the log-probs of ``sampling`` would be wrong; None where they are right."""
        lowest, highest = self.temperatures
        if sampling.greedy:
            return None
        if not lowest <= sampling.temperature <= highest:
            return (
                f"draws at temperatures from {lowest:g} to {highest:g}, and not at {sampling.temperature:g}"
            )
        if not self.full_distribution and (sampling.top_k or sampling.top_p < 1 or sampling.min_p):
            cuts = f"top_k = {sampling.top_k}, top_p = {sampling.top_p:g}, min_p = {sampling.min_p:g}"
            return f"reports log-probs of the distribution that these have cut: {cuts}"
        return None

    def update_problem(self, method: SyncMethod, *, tied: bool) -> str | None:
        """The reason for which an update by ``method`` would fail; ``tied`` is for a head with the embedding's weights.

        None where it would not.
        """
        if method in self.refused:
            return f"takes no weights by {method!r}: {self.refused[method]}"
        if method == "disk" and tied and not self.updates_tied_heads:
            return "would keep its old head: the model ties the head to the embedding, whose new weights it loads alone"
        return None


NO_LIMITS = ServerLimits()
