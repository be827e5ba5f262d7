"""Adapters on a real server: the adapter of a request, and their return after a crash or a sleep."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from server_stub import ADAPTERS
from sglang_support import API_KEY, backend_of, build, tiny_model
from test_sglang_servers import LENGTH, asked, logprobs, pid_of, processes, require_serves

from core_rl.backend.meta import WeightUpdateMeta
from core_rl.engine.inference import InferenceEngine
from core_rl.errors import WeightsError
from core_rl.weight_sync.messages import AdapterMetadata
from core_rl_conformance.inputs.tiny_adapters import TinyAdapter
from core_rl_conformance.inputs.tiny_models import TinyModel
from core_rl_conformance.procedures.adapters import written
from core_rl_conformance.procedures.streaming import sent
from core_rl_oracle.low_rank import LowRank


def adapter(engine: InferenceEngine, seed: int) -> LowRank:
    """One as ``engine`` takes them."""
    lora = engine.config.model.lora
    assert lora is not None
    complete = TinyAdapter(
        model=TinyModel(family="llama"), rank=lora.rank, alpha=lora.alpha, rslora=True, seed=seed
    ).low_rank()
    retained = {
        name: value
        for name, value in complete.factors.items()
        if name.rsplit(".", 3)[-3] in lora.target_modules
    }
    return LowRank(factors=retained, scaling=complete.scaling)


def give(engine: InferenceEngine, low_rank: LowRank, version: int, tmp_path: Path) -> None:
    meta = WeightUpdateMeta(method="lora", version=version, path=str(tmp_path / "meet"), verify=True)
    lora = engine.config.model.lora
    assert lora is not None
    message = AdapterMetadata(
        rank=lora.rank, alpha=lora.alpha, rslora=lora.rslora, base=backend_of(engine).model.digest
    )
    sent(engine, meta, written(low_rank.factors), message)


def test_request_keeps_its_adapter(adapted: InferenceEngine, root: Path, tmp_path: Path) -> None:
    model, sides = tiny_model(root), {1: adapter(adapted, 1), 2: adapter(adapted, 2)}
    give(adapted, sides[1], 1, tmp_path)
    actual = asked(adapted, 12, lambda: give(adapted, sides[2], 2, tmp_path))
    actual += asked(adapted, 2)
    assert {version for response in actual for version in response.versions} == {1, 2}
    for response in actual:
        (version,) = set(response.versions)
        complete = logprobs(model, sides[version], [*response.input_ids, *response.output_ids])
        drawn = complete[-len(response.output_ids) :]
        torch.testing.assert_close(torch.tensor(response.logprobs), drawn, atol=5e-5, rtol=0)


@pytest.mark.nightly
def test_memory_comes_back_with_the_adapter(adapted: InferenceEngine, root: Path, tmp_path: Path) -> None:
    served = adapter(adapted, 3)
    give(adapted, served, 3, tmp_path)
    adapted.release_memory()
    adapted.resume_memory()
    require_serves(adapted, tiny_model(root), served)
    assert {version for response in asked(adapted, 2) for version in response.versions} == {3}


@pytest.mark.nightly
def test_replacement_server_gets_adapter_first(adapted: InferenceEngine, root: Path, tmp_path: Path) -> None:
    served, before = adapter(adapted, 4), pid_of(adapted)
    give(adapted, served, 5, tmp_path)
    actual = asked(adapted, 12, lambda: os.kill(before, signal.SIGKILL))
    assert {(len(response.output_ids), response.stop_reason) for response in actual} == {(LENGTH, "length")}
    assert {version for response in actual for version in response.versions} == {5}
    assert pid_of(adapted) != before
    assert not processes(before)
    require_serves(adapted, tiny_model(root), served)


@pytest.mark.nightly
def test_refused_adapter_changes_nothing(adapted: InferenceEngine, root: Path, tmp_path: Path) -> None:
    served = adapter(adapted, 6)
    give(adapted, served, 6, tmp_path)
    address = backend_of(adapted).servers[0].address
    second = build(
        tiny_model(root), lora={**ADAPTERS, "rank": 5}, addresses=(address,), take_over=True, api_key=API_KEY
    )
    second.initialize()
    try:
        with pytest.raises(WeightsError, match="version 1 was refused.*rank 5 is incompatible"):
            give(second, adapter(second, 1), 1, tmp_path)
        assert second.get_version() == 0
    finally:
        second.destroy()
