"""Whether a packed sequence sees its neighbour: log-probs in a pack and alone, in nats, in float32."""

from __future__ import annotations

import tempfile
from pathlib import Path

from field.models import tokens, write_model
from field.peers.interface import Peer
from field.row import Figure, Row

CASES = ("qwen3", "qwen3_next", "qwen3_5_text")
LIMIT = 1e-4
"""Of rounding: leaks are of 0.01 nats and more."""


def measure(peer: Peer, case: str) -> Figure:
    """Of the model ``case``."""
    with tempfile.TemporaryDirectory() as directory:
        peer.open(write_model(case, Path(directory)), "float32")
        sequences = [tokens(20, seed=1), tokens(24, seed=2)]
        packed = peer.logprobs(sequences)
        alone = [peer.logprobs([ids])[0] for ids in sequences]
    error = max(float((a - b).abs().max()) for a, b in zip(packed, alone, strict=True))
    return Figure(error, LIMIT, "nats")


ROW = Row(
    title="packed neighbours",
    description=(
        "Log-probs of two sequences of 20 and 24 tokens that share a packed row, next to the log-probs of each "
        "alone: the largest difference, in float32. qwen3, of attention alone, is the control. Without CUDA kernels, "
        "transformers refuses the boundaries of sequences, which TRL and AReaL pass, and verl and its own default "
        "collator do not. verl passes them for the model types qwen3_5 and qwen3_5_moe alone "
        "([#6660](https://github.com/verl-project/verl/pull/6660)), and "
        "[#5346](https://github.com/verl-project/verl/pull/5346) is open for Qwen3-Next."
    ),
    cases=CASES,
    measure=measure,
)
