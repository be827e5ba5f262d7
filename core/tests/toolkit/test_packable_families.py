"""Models that cannot be packed right are refused by name: rules over their layers and heads."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_families import packed_model

from core_rl.errors import UnsupportedCapability


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("llama4_text", "'llama4_text' has layers of the kind chunked_attention"),
        ("bloom", "'bloom' has layers that ignore .* BloomAttention"),
        ("gptj", "'gptj' has attention layers that ignore transformers' attention interface"),
        ("bart", "'bart' has positions that BartDecoder counts over the whole pack"),
        ("xlstm", "'xlstm' has no layers that are known to mix tokens"),
        ("electra", "'electra' has a head"),
    ],
)
def test_unpackable_model_is_refused_by_name(family: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedCapability, match=message):
        packed_model(family, tmp_path)


@pytest.mark.parametrize("family", ["falcon_h1", "granite", "cohere", "gemma2"])
def test_scaling_and_capping_heads_are_accepted(family: str, tmp_path: Path) -> None:
    """That they are computed right is for `nox -s families`; here the check of the head passes."""
    packed_model(family, tmp_path)
