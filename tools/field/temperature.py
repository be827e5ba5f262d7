"""Whether logits of bfloat16 are divided by the temperature in float32: the error of log-probs, in nats."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from field.models import tokens, write_model
from field.peers.interface import Peer
from field.row import Figure, Row

CASES = {"T = 0.6": (0.6, 0.5), "T = 0.3": (0.3, 0.25)}
"""The temperature, and the power of two below, by which every float divides without rounding."""
ROUNDING = 1e-4
"""Of float32, in nats."""


def measure(peer: Peer, case: str) -> Figure:
    """At the temperature ``case``."""
    with tempfile.TemporaryDirectory() as directory:
        peer.open(write_model("qwen3", Path(directory)), "bfloat16")
        ids = tokens(512, seed=1)
        logits = peer.logits(ids)
        error, exact = (_error(peer.logprobs([ids], value), logits, ids, value) for value in CASES[case])
    return Figure(error, exact + ROUNDING, "nats")


def _error(logprobs: Sequence[Tensor], logits: Tensor, ids: Tensor, temperature: float) -> float:
    expected = torch.log_softmax(logits[:-1].double() / temperature, -1).gather(1, ids[1:, None])[:, 0]
    return float((logprobs[0].double() - expected).square().mean().sqrt())


ROW = Row(
    title="temperature in bfloat16",
    description=(
        "Log-probs of 512 tokens at a temperature, next to the log-probs that float64 gives from the framework's own "
        "logits: the root mean square of their difference. The limit is the same error at temperature 0.5 or 0.25, "
        "by which bfloat16 divides without rounding, so that a softmax in bfloat16 does not count. verl divides in the "
        "dtype of the logits (no upstream report known). On CUDA, TRL has another kernel, which did not run."
    ),
    cases=CASES,
    measure=measure,
)
