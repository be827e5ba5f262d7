"""Bytes that an export moves, at 8 and at 64 ranks: only the writer receives, and not much more than the model."""

from __future__ import annotations

from typing import Any

import pytest
from recorded_ranks import Cut, experts_apart, export_traffic, hybrid, sharded, whole_model

from core_rl.state.gather import BUCKET_BYTES

QWEN3_30B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151_936,
    "tie_word_embeddings": False,
}
LAYOUTS: dict[str, tuple[tuple[int, ...], Cut]] = {
    "dp8": ((8,), sharded),
    "dp64": ((64,), sharded),
    "8 copies over 8": ((8, 8), hybrid),
    "ep8": ((1, 8), experts_apart),
    "ep8 dp8": ((8, 8), experts_apart),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_only_the_writer_receives_and_each_byte_once(layout: str) -> None:
    """Padding parts to one size, or sending all copies, received up to 60 times the model on each rank."""
    sizes, cut = LAYOUTS[layout]
    model = whole_model(QWEN3_30B | {"num_hidden_layers": 1, "num_experts": 32})
    size = sum(parameter.nbytes for parameter in model.parameters())
    largest = max(parameter.nbytes for parameter in model.parameters())
    traffic = export_traffic(model, sizes, cut)
    assert 0 < traffic.received[0] <= 1.1 * size
    assert traffic.received.total() == traffic.received[0] == traffic.sent.total()
    assert traffic.largest <= max(BUCKET_BYTES, largest)
