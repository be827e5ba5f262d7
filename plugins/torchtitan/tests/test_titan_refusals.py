"""Refusals of models, layouts and versions, before anything is built and with the number to change."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest
import titan_support as support
import torch
from transformers import AutoConfig

from core_rl.config.layout import ParallelLayout
from core_rl.data.batch import SequenceBatch
from core_rl.errors import BatchError, ConfigError, CoreRLError, LayoutError, UnsupportedCapability
from core_rl.toolkit.parallel_context import WHOLE
from core_rl_conformance.inputs.tiny_models import LLAMA3
from core_rl_torchtitan.modules import PackedDecoder
from core_rl_torchtitan.translation import decoder_config

YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
REFUSED: list[tuple[dict[str, int], Mapping[str, Any], type[CoreRLError], str]] = [
    ({"tp": 3}, {}, LayoutError, r"(?s)tp=3 does not divide num_attention_heads=4.*num_key_value_heads=2"),
    ({"tp": 4}, {}, LayoutError, r"tp=4 does not divide num_key_value_heads=2"),
    ({"tp": 2}, {"intermediate_size": 41}, LayoutError, r"tp=2 does not divide intermediate_size=41"),
    ({"tp": 2}, {"vocab_size": 1}, LayoutError, r"tp=2 leaves ranks without a row of vocab_size=1"),
    ({"dp": 2, "ep": 2}, {}, LayoutError, r"ep=2 for a model without experts"),
    ({"dp": 4, "ep": 4}, support.MOE, LayoutError, r"ep=4 does not divide num_experts=6"),
    ({"tp": 2}, support.MOE, LayoutError, r"tp=2 for a mixture of experts"),
    ({"cp": 3}, {}, LayoutError, r"4 attention heads cannot be spread over cp=3"),
    (
        {},
        {"model_type": "gemma2"},
        UnsupportedCapability,
        r"no mapping for the model family 'gemma2'.*'fsdp'",
    ),
    ({}, {"attention_bias": True}, UnsupportedCapability, r"attention_bias=True"),
    ({}, {"attention_dropout": 0.1}, UnsupportedCapability, r"attention_dropout=0.1"),
    ({}, {"hidden_act": "gelu"}, UnsupportedCapability, r"hidden_act='gelu'"),
    ({}, {"rope_parameters": YARN}, UnsupportedCapability, r"rope_type='yarn'"),
    ({}, {"rope_parameters": {**LLAMA3, "rope_theta": 1e4}}, UnsupportedCapability, r"rope_type='llama3'"),
]


@pytest.mark.parametrize(
    ("degrees", "model", "error", "says"), REFUSED, ids=[f"{row[0]}-{[*row[1]]}" for row in REFUSED]
)
def test_unfit_model_is_refused(
    degrees: dict[str, int], model: Mapping[str, Any], error: type[CoreRLError], says: str
) -> None:
    with pytest.raises(error, match=says):
        decoder_config(AutoConfig.for_model(**support.TINY | dict(model)), ParallelLayout(**degrees), "lm")


def test_engine_refuses_copies_and_parts() -> None:
    with pytest.raises(LayoutError, match="options.replicas=2 must divide dp=1"):
        support.started(support.config(options={"replicas": 2}))
    with pytest.raises(ConfigError, match="a part of torchtitan's.*wqkv"):
        support.started(support.config(frozen=["*.layers.0.self_attn.q_proj.*"]))


def test_sequence_beyond_rotary_positions_is_refused() -> None:
    model = AutoConfig.for_model(**support.TINY)
    with torch.device("meta"):
        decoder = decoder_config(model, ParallelLayout(), "lm").build()
    longer = SequenceBatch.from_sequences([torch.zeros(model.max_position_embeddings + 1, dtype=torch.long)])
    with pytest.raises(BatchError, match="65 tokens, and torchtitan computes rotary embeddings for 64"):
        PackedDecoder(decoder, "lm", WHOLE)(longer, ["logprobs"], 1.0, trained_only=False)


def test_spec_imports_neither_torch_nor_torchtitan() -> None:
    code = "import sys, core_rl_torchtitan; sys.exit('torch' in sys.modules or 'torchtitan' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=dict(os.environ), check=False).returncode == 0
