"""Rotary frequencies that depend on a length take that of the sequence: not of a pack, a slice or an earlier pass."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_families import (
    ROTARY_SCALINGS,
    packed_logprobs,
    packed_model,
    tiny_model,
    token_logprobs,
    with_rotary_scaling,
)

from core_rl.config.engine import ModelConfig
from core_rl.data.batch import SequenceBatch
from core_rl.errors import BatchError, UnsupportedCapability
from core_rl.toolkit.build import build_model
from core_rl.toolkit.hf_backend import check_packing, small_thresholds
from core_rl.toolkit.parallel_context import WHOLE, TokenSlice
from core_rl.toolkit.positions import RotaryEmbeddings, frequencies_change, rotary_modules

LENGTHS = (12, 40, 5, 16, 17, 90)
"""Below, at and above the thresholds of `ROTARY_SCALINGS`."""
SEQUENCES = [torch.arange(length) * 5 % 97 for length in LENGTHS]


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *[(family, "longrope") for family in ("phi3", "phimoe", "llama", "gemma3_text", "qwen3_next")],
        *[(family, "dynamic") for family in ("llama", "gemma3_text")],
        *[(family, "yarn") for family in ("ministral3", "deepseek_v3")],
    ],
)
def test_packed_sequences_have_their_frequencies(family: str, kind: str, tmp_path: Path) -> None:
    config = with_rotary_scaling(family, kind)
    packed = packed_model(family, tmp_path, config=config)
    check_packing(packed, "float32")
    values = packed_logprobs(packed, SEQUENCES)
    for ids, value in zip(SEQUENCES, values, strict=True):
        [alone] = token_logprobs(tiny_model(family, config=config), [ids])  # a model without a history
        torch.testing.assert_close(value, alone, rtol=0, atol=1e-3)


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_probe_finds_lengths_of_the_pack(kind: str, tmp_path: Path) -> None:
    packed = packed_model("llama", tmp_path, config=with_rotary_scaling("llama", kind, length=4096))
    check_packing(packed, "float32")
    for module in packed.rotary.modules:
        del module.forward
    with pytest.raises(UnsupportedCapability, match="takes a length from the whole pack"):
        check_packing(packed, "float32")


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_cut_sequences_keep_their_length(kind: str) -> None:
    """Each of several context parallel ranks sees a slice, perhaps only the beginning of a long sequence."""
    config = with_rotary_scaling("llama", kind)
    batch = SequenceBatch.from_sequences(SEQUENCES)
    complete = WHOLE.slice_of(batch)
    rotary: Any = tiny_model("llama", config=config).base_model.rotary_emb
    parent = torch.nn.ModuleList([rotary])
    embeddings = RotaryEmbeddings(parent)

    def turned(tokens: TokenSlice) -> torch.Tensor:
        embeddings.begin(tokens)
        cos: torch.Tensor = rotary(torch.zeros(1), tokens.position_ids[None])[0]
        return cos

    parts = [
        turned(
            replace(
                complete,
                input_ids=complete.input_ids[start : start + 20],
                position_ids=complete.position_ids[start : start + 20],
                start=start,
            )
        )
        for start in range(0, batch.num_tokens, 20)
    ]
    assert torch.equal(torch.cat(parts, 1), turned(complete))


def test_dynamic_frequencies_forget_longer_passes(tmp_path: Path) -> None:
    tiny_model("llama", config=with_rotary_scaling("llama", "dynamic")).save_pretrained(tmp_path)
    model = build_model(ModelConfig(path=str(tmp_path)), seed=0, attn_implementation="eager")
    fresh = copy.deepcopy(model)
    long, middle = torch.arange(90) % 97, torch.arange(40) % 97
    assert torch.equal(token_logprobs(model, [long, middle])[1], token_logprobs(fresh, [middle])[0])


@pytest.mark.parametrize(
    ("kind", "first", "last", "change"),
    [
        ("longrope", 3, 16, False),
        ("longrope", 16, 17, True),
        ("longrope", 17, 90, False),
        ("dynamic", 17, 18, True),
        ("yarn", 3, 90, False),
    ],
)
def test_frequencies_change_at_the_threshold(kind: str, first: int, last: int, change: bool) -> None:
    model = tiny_model("llama", config=with_rotary_scaling("llama", kind))
    assert frequencies_change(model, first, last) is change


def test_probe_restores_lengths() -> None:
    model = tiny_model("gemma3_text", config=with_rotary_scaling("gemma3_text", "longrope", length=4096))
    before = copy.deepcopy(model.config.to_dict())
    with small_thresholds(model):
        assert frequencies_change(model, 8, 9)
        assert model.config.to_dict() != before
    assert model.config.to_dict() == before


def test_gpt2_names_sequences_beyond_positions(tmp_path: Path) -> None:
    packed = packed_model("gpt2", tmp_path)
    with pytest.raises(BatchError, match="a sequence has 65 tokens, and the model type 'gpt2' has learned"):
        packed_logprobs(packed, [torch.arange(65)])


@pytest.mark.parametrize("kind", ROTARY_SCALINGS)
def test_only_lengths_need_single_sequences(kind: str) -> None:
    model = tiny_model("llama", config=with_rotary_scaling("llama", kind))
    assert bool(rotary_modules(model)) is (kind in ("longrope", "dynamic"))
