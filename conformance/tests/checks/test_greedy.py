"""Greedy paths: the search agrees with the oracle on a single sequence."""

from __future__ import annotations

from pathlib import Path

import pytest

from core_rl_conformance.checks.sampling import STEPS, end_of, find_path
from core_rl_conformance.inputs.tiny_models import ModelStore, TinyModel
from core_rl_oracle.oracle import Oracle, OracleSequence


@pytest.mark.parametrize("family", ["qwen3", "llama", "gpt2"])
@pytest.mark.parametrize("seed", range(2))
def test_greedy_path_takes_most_likely_tokens(family: str, seed: int, tmp_path: Path) -> None:
    model = TinyModel(family=family, seed=seed)
    oracle = Oracle(ModelStore(tmp_path).directory(model))
    path = find_path(oracle, model.vocab_size, seed)
    (outputs,) = oracle.evaluate([OracleSequence(input_ids=[*path.prompt, *path.ids])])
    assert outputs["logits"][-STEPS:].argmax(-1).tolist() == list(path.ids)
    first, last = (path.ids.index(token) for token in path.stops)
    assert 0 < first < last
    assert end_of(path.ids, {path.stops[0]}, ()) == first + 1
    assert end_of(path.ids, {model.vocab_size}, ()) is None
