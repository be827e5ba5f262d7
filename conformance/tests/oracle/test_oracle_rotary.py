"""The oracle's values of a sequence do not depend on the sequences before it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from core_rl_oracle.oracle import Oracle, OracleSequence


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_oracle_forgets_longer_sequences(kind: str, tmp_path: Path) -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "original_max_position_embeddings": 8}
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        initializer_range=0.5,
        max_position_embeddings=8,
        rope_parameters={"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
        | (factors if kind == "longrope" else {}),
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    long, middle = (OracleSequence(input_ids=list(range(length))) for length in (40, 20))
    after = Oracle(tmp_path).evaluate([long, middle])[1]["logprobs"]
    alone = Oracle(tmp_path).evaluate([middle])[0]["logprobs"]
    assert torch.equal(after, alone)
