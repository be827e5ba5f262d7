"""Images through a real server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from server_stub import complete, engine_of, initialized

from core_rl.data.requests import LLMRequest, SamplingParams
from core_rl.engine.inference import InferenceEngine
from core_rl_conformance.inputs.tiny_models import ModelStore, TinyModel
from core_rl_conformance.inputs.tiny_vision import TinyImages, placeholders
from core_rl_oracle.oracle import Oracle, OracleSequence

SIZE = (4, 2)
PROMPT = (5, 8, *placeholders("qwen3_vl", SIZE), 7)
SAMPLING = SamplingParams(max_new_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def model(root: Path) -> Path:
    return ModelStore(root).directory(TinyModel(family="qwen3_vl"))


@pytest.fixture
def serving(model: Path) -> Iterator[InferenceEngine]:
    engine = engine_of("sglang", model={"path": str(model), "vision": True})
    with initialized(engine):
        yield engine


@pytest.mark.nightly
def test_group_sees_its_image(serving: InferenceEngine, model: Path) -> None:
    """A group of answers to one picture, and another picture in its place."""
    oracle = Oracle(model, vision=True)
    for seed in (0, 1):
        media = TinyImages("qwen3_vl", seed, (SIZE,)).media()
        requests = [LLMRequest(input_ids=PROMPT, media=media, sampling=SAMPLING) for _ in range(4)]
        for response in complete(serving, *requests):
            ids = [*response.input_ids, *response.output_ids]
            (row,) = oracle.evaluate([OracleSequence(input_ids=ids, fields={}, media=media)], 1.0)
            expected = row["logprobs"][len(PROMPT) :].float()
            torch.testing.assert_close(torch.tensor(response.logprobs), expected, atol=5e-5, rtol=0)
