"""Bytes that an export moves, at 8 and at 64 ranks: only the writer receives, and not much more than the model."""

from __future__ import annotations

import pytest
from published_models import QWEN3_30B
from recorded_ranks import Cut, experts_apart, export_traffic, hybrid, sharded, whole_model

from core_rl.state.gather import BUCKET_BYTES

LAYOUTS: dict[str, tuple[tuple[int, ...], Cut]] = {
    "dp8": ((8,), sharded),
    "dp64": ((64,), sharded),
    "8 copies over 8": ((8, 8), hybrid),
    "ep8": ((1, 8), experts_apart),
    "ep8 dp8": ((8, 8), experts_apart),
}


@pytest.mark.sampled(5)
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
