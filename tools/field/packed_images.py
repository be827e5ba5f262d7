"""Whether packed sequences with images are computed as each alone, in nats, in float32."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from field.models import Pictured, pictured, write_vision_model
from field.peers.interface import Peer
from field.row import Figure, Row

LIMIT = 1e-4
"""Rounding; wrong positions change log-probs by 0.01 nats and more."""


def measure(peer: Peer, case: str) -> Figure:
    """Of the model ``case``."""
    with tempfile.TemporaryDirectory() as directory:
        path = write_vision_model(case, Path(directory))
        sequences = [pictured(case, 20, (4, 4), seed=1), pictured(case, 24, (4, 6), seed=2)]
        # First: verl replaces forward passes of transformers.
        alone = _alone(path, sequences)
        packed = peer.image_logprobs(path, sequences)
    error = max(float((a - b).abs().max()) for a, b in zip(packed, alone, strict=True))
    return Figure(error, LIMIT, "nats")


@torch.no_grad()
def _alone(path: str, sequences: Sequence[Pictured]) -> list[Tensor]:
    """Log-probs of each sequence by transformers, which counts its positions."""
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    image = model.config.image_token_id
    rows = []
    for row in sequences:
        kinds = (row.ids == image).int()[None]
        logits = model(input_ids=row.ids[None], mm_token_type_ids=kinds, use_cache=False, **row.media).logits[
            0
        ]
        rows.append(logits[:-1].log_softmax(-1).gather(1, row.ids[1:, None])[:, 0])
    return rows


ROW = Row(
    title="positions of packed images",
    description=(
        "Log-probs of two sequences of 20 and 24 tokens with an image each, in one packed row, next to the log-probs "
        "that transformers gives for each alone: the largest difference, in float32. Qwen3-VL counts positions in "
        "time, height and width, and packed rows need a row of text positions in front of these. The collator of "
        "transformers leaves images out, and has positions of text alone (no upstream report known); the images are "
        "added to its row. verl gets positions as its agent loop makes them. TRL has an open request "
        "([#4339](https://github.com/huggingface/trl/issues/4339))."
    ),
    cases=("qwen3_vl",),
    measure=measure,
)
