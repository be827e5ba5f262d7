"""Whether a critic trains under dropout: its values in two training passes of one batch, in per cent."""

from __future__ import annotations

import tempfile
from pathlib import Path

from field.models import tokens, write_model
from field.peers.interface import Peer
from field.row import Figure, Row

WITHOUT = "disable_dropout=True"
CASES = ("default", WITHOUT)
LIMIT = 1e-3
"""Of rounding, in per cent."""


def measure(peer: Peer, case: str) -> Figure:
    """With the setting ``case``."""
    with tempfile.TemporaryDirectory() as directory:
        model_dir, sequences = write_model("qwen3", Path(directory)), [tokens(20, seed=1), tokens(24, seed=2)]
        first, second = peer.critic(model_dir, sequences, disable_dropout=case == WITHOUT)
    difference, size = (first - second).square().mean().sqrt(), first.square().mean().sqrt()
    return Figure(float(100 * difference / size), LIMIT, "%")


ROW = Row(
    title="dropout in the critic",
    description=(
        "Values of a qwen3 critic, whose config has no dropout, in two training passes of one batch: the root mean "
        "square of their difference, in per cent of that of the values. "
        "The default of transformers' token classifiers is a rate of 0.1; verl sets it to 0, and AReaL does not (no "
        "upstream report known). verl's critic is loaded with eager attention in place of FlashAttention."
    ),
    cases=CASES,
    measure=measure,
)
