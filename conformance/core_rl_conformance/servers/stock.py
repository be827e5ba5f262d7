"""Known failures of servers as their packages are, by product and version."""

from __future__ import annotations

from collections.abc import Mapping

from core_rl.servers.api import Refused
from core_rl_conformance.profile import Waiver

OWNER = "vLLM"
CUT = "processed_logprobs are of the distribution that top-k, top-p and min-p have cut: vLLM #22387, #42259"

KNOWN_FAILURES: Mapping[str, tuple[Waiver, ...]] = {
    "vLLM 0.32.0": (
        Waiver(check="I8.rollout-cut", reason=CUT, owner=OWNER, raises=AssertionError),
        Waiver(check="I8.min-p", reason=CUT, owner=OWNER, raises=AssertionError),
        Waiver(
            check="I8.sampling",
            reason="temperatures above 2 are refused: vLLM #44965",
            owner=OWNER,
            raises=Refused,
        ),
    ),
}
"""Failures without a plugin on the server. They are strict: another version has to be judged anew."""
