"""Rotary bases of long tiny models, which differ from any default and from kind to kind of layer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoConfig

from core_rl_conformance.inputs.tiny_models import ModelStore, TinyModel, build

LONG = TinyModel(family="gemma3_vl", long=True)


def test_kinds_of_layers_have_bases_apart(tmp_path: Path) -> None:
    """In a config that can be read again."""
    config = AutoConfig.from_pretrained(ModelStore(tmp_path).directory(LONG))
    usual = replace(LONG, usual="rope_theta").config().get_text_config().rope_parameters
    bases = {kind: part["rope_theta"] for kind, part in config.get_text_config().rope_parameters.items()}
    assert bases.keys() == {"full_attention", "sliding_attention"}
    assert len({*bases.values(), *(part["rope_theta"] for part in usual.values())}) == 4


def test_rotary_bases_change_outputs_of_model() -> None:
    ids = torch.arange(40)[None] % LONG.vocab_size
    with torch.no_grad():
        unusual, usual = (
            build(model).eval()(input_ids=ids).logits for model in (LONG, replace(LONG, usual="rope_theta"))
        )
        swapped = build(LONG).eval()
        parameters = swapped.config.get_text_config().rope_parameters
        parameters["full_attention"], parameters["sliding_attention"] = (
            parameters["sliding_attention"],
            parameters["full_attention"],
        )
        exchanged = type(swapped)(swapped.config).eval()
        exchanged.load_state_dict(swapped.state_dict())
        other = exchanged(input_ids=ids).logits
    assert (unusual - usual).abs().max() > 0.1
    assert (unusual - other).abs().max() > 0.1
