"""Servers that others started: checked before anything is changed. Servers are stubs here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from server_stub import ADAPTERS, LONGEST, complete
from vllm_support import GENERATE, VllmStub, build, connected, stubs, tiny_model

from core_rl.backend.meta import WeightUpdateMeta
from core_rl.data.batch import SequenceBatch
from core_rl.data.requests import LLMRequest, SamplingParams
from core_rl.errors import ConfigError, UnsupportedCapability
from core_rl.servers.facts import label_of
from core_rl_conformance.inputs.tiny_models import ModelStore, TinyModel
from core_rl_vllm.server import VllmServer

CONSTRAINT = Path(__file__).parents[3] / "constraints" / "vllm-server-unresolved.txt"


@pytest.fixture
def stub(tmp_path: Path) -> Iterator[VllmStub]:
    with stubs(tmp_path) as made:
        yield made[0]


@pytest.mark.parametrize(
    ("family", "config", "message"),
    [
        ("llama", {}, r"its config has model_type = 'llama' \(model.path: 'qwen3'\)"),
        ("qwen3", {"logprobs_mode": "raw_logprobs"}, "--logprobs-mode raw_logprobs; start it with processed"),
        ("qwen3", {"generation_config": "auto"}, "--generation-config auto; start it with vllm"),
        ("qwen3", {"dtype": "torch.bfloat16"}, "it computes in bfloat16, and dtype is float32; set dtype to"),
    ],
)
def test_misfit_stays_untouched(
    stub: VllmStub, tmp_path: Path, family: str, config: dict[str, Any], message: str
) -> None:
    stub.model_path = str(
        ModelStore(tmp_path).directory(TinyModel(family=family, head_size=32, longest=LONGEST))
    )
    stub.config = config
    with pytest.raises(ConfigError, match=f"nothing was changed.*{message}"), connected([stub]):
        pass
    assert stub.changes == set()


def test_addresses_of_initialize_are_steered(stub: VllmStub, tmp_path: Path) -> None:
    engine = build(stub.model_path)
    try:
        engine.initialize(stub.address)
        engine.update_weights(WeightUpdateMeta(version=1, path=tiny_model(tmp_path, seed=1))).result(20)
        assert stub.label == label_of(1)
    finally:
        engine.destroy()


def test_scores_with_adapters_are_refused(stub: VllmStub) -> None:
    batch = SequenceBatch.from_sequences([[5, 8, 2]])
    with connected([stub], lora=ADAPTERS) as engine:
        for call in (engine.score, lambda batch: engine.top_logprobs(batch, 2)):
            with pytest.raises(UnsupportedCapability, match=r"model.lora is set.*vLLM #16668"):
                call(batch)
    assert GENERATE not in stub.calls


def test_min_p_beside_top_p_is_refused(stub: VllmStub) -> None:
    sampling = SamplingParams(max_new_tokens=2, min_p=0.2)
    with connected([stub]) as engine:
        with pytest.raises(
            UnsupportedCapability, match=r"cuts by min_p = 0.2 before top_p = 0.5; set one of them"
        ):
            complete(engine, LLMRequest(input_ids=(5, 17), sampling=replace(sampling, top_p=0.5)))
        complete(engine, LLMRequest(input_ids=(5, 17), sampling=replace(sampling, top_k=3)))


def test_label_names_the_run(stub: VllmStub, tmp_path: Path) -> None:
    with connected([stub]) as engine:
        engine.update_weights(WeightUpdateMeta(version=5, path=tiny_model(tmp_path, seed=1))).result(20)
        assert stub.label == label_of(5)
    with pytest.raises(ConfigError, match="steers it"), connected([stub], take_over=False):
        pass


def test_tested_release_is_that_of_constraints() -> None:
    lines = CONSTRAINT.read_text().splitlines()
    assert {line.partition("==")[2] for line in lines if line.startswith("vllm")} == VllmServer.tested
