"""Servers without core-rl-vllm-server: requests and updates that they get wrong are refused. Servers are stubs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from server_stub import LONGEST, complete
from vllm_support import VllmStub, connected, stubs, tiny_model

from core_rl.backend.meta import WeightUpdateMeta
from core_rl.data.requests import LLMRequest, SamplingParams
from core_rl.errors import ConfigError, UnsupportedCapability
from core_rl.servers.facts import label_of
from core_rl_conformance.inputs.tiny_models import ModelStore, TinyModel

INSTALL = "install core-rl-vllm-server into the server's environment"
ELSEWHERE = "core-rl:elsewhere:1:9f3c:3"


@pytest.fixture(params=[None, {"backend": "nccl"}], ids=["no-transfer", "nccl"])
def stub(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[VllmStub]:
    with stubs(tmp_path) as made:
        made[0].transfer = request.param
        yield made[0]


def draw(sampling: dict[str, Any]) -> LLMRequest:
    return LLMRequest(input_ids=(5, 17), sampling=SamplingParams(max_new_tokens=2, **sampling))


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"temperature": 0.003}, "draws at temperatures from 0.01 to 2, and not at 0.003"),
        ({"temperature": 7.0}, "draws at temperatures from 0.01 to 2, and not at 7"),
        ({"top_p": 0.5}, "reports log-probs of the distribution that these have cut: .*top_p = 0.5"),
        ({"top_k": 3}, "these have cut: .*top_k = 3"),
        ({"min_p": 0.2}, "these have cut: .*min_p = 0.2"),
    ],
)
def test_wrong_logprobs_are_refused(stub: VllmStub, sampling: dict[str, Any], message: str) -> None:
    with connected([stub]) as engine:
        with pytest.raises(UnsupportedCapability, match=f"{message}.*{INSTALL}"):
            complete(engine, draw(sampling))
        assert not stub.asked
        complete(engine, draw({}), draw({"temperature": 0.01}), draw({"temperature": 0.0, "top_p": 0.5}))
        assert len(stub.asked) == 3


@pytest.mark.parametrize(("method", "transfer"), [("tensor", "ipc"), ("distributed", "nccl")])
def test_buckets_are_refused(
    stub: VllmStub, tmp_path: Path, method: Literal["tensor", "distributed"], transfer: str
) -> None:
    with connected([stub]) as engine:
        before = set(stub.changes)
        meta = WeightUpdateMeta(method=method, version=1, path=str(tmp_path / "meet"))
        reason = (
            f"{stub.address} takes no weights by '{method}': vLLM's own transfer '{transfer}' .*; {INSTALL}"
        )
        with pytest.raises(ConfigError, match=reason):
            engine.update_weights(meta).result(20)
        assert stub.changes == before


@pytest.mark.parametrize(("device", "tied"), [("cpu", True), ("cpu", False), ("cuda", True)])
def test_tied_heads_are_not_updated_on_cpus(stub: VllmStub, tmp_path: Path, device: str, tied: bool) -> None:
    stub.device = device
    family, store = "qwen3" if tied else "llama", ModelStore(tmp_path)
    old, new = (
        str(store.directory(TinyModel(family=family, seed=seed, head_size=32, longest=LONGEST)))
        for seed in (0, 1)
    )
    stub.model = stub.model_path = old
    with connected([stub]) as engine:
        arrival = engine.update_weights(WeightUpdateMeta(version=1, path=new))
        if device == "cpu" and tied:
            with pytest.raises(ConfigError, match=f"would keep its old head.*{INSTALL}"):
                arrival.result(20)
            assert stub.label == label_of(0)
        else:
            arrival.result(20)
            assert stub.label == label_of(1)


@pytest.mark.parametrize("change", ["path", "label"])
def test_stale_tied_heads_are_refused_at_connect(stub: VllmStub, tmp_path: Path, change: str) -> None:
    if change == "path":
        stub.model_path = tiny_model(tmp_path, seed=1)
    else:
        stub.label = ELSEWHERE
    message = f"nothing was changed.*would keep its old head.*start it with model.path, or {INSTALL}"
    with pytest.raises(ConfigError, match=message), connected([stub]):
        pass
    assert stub.changes == set()
