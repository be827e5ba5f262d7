"""A server of vLLM alone, whose processes load no core-rl-vllm-server, with vLLM's own transfer of weights."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
from drawn_tokens import check_update_in_flight, require_drawn_by, require_serves
from server_stub import LONGEST, complete, logged_calls, request
from vllm_support import build

from core_rl.backend.meta import WeightUpdateMeta
from core_rl.data.requests import LLMRequest, SamplingParams
from core_rl.errors import ConfigError, RolloutError
from core_rl_conformance.inputs.tiny_models import ModelStore, TinyModel
from core_rl_conformance.servers.target import launched_server
from core_rl_vllm.backend import PYTHON_VARIABLE

ENVIRONMENT = (
    "VLLM_PLUGINS= VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 "
    "VLLM_CPU_OMP_THREADS_BIND=nobind TORCHDYNAMO_DISABLE=1"
)
# Not the command ``vllm``, which asks for the distribution of that name, and on CPUs it is another.
MODULE = "-m vllm.entrypoints.openai.api_server"
ARGUMENTS = (
    "--model {model} --port {port} --dtype float32 --enforce-eager --kv-cache-memory-bytes 268435456 "
    "--enable-scale-out --skip-tokenizer-init --logprobs-mode processed_logprobs --max-logprobs -1 "
    f"--generation-config vllm --max-model-len {LONGEST + 1} "
    '--weight-transfer-config \'{{"backend": "nccl"}}\''
)
GENERATE = ("POST", "/inference/v1/generate")


@dataclass
class StockServer:
    """A running server, and the calls in its log."""

    address: str
    log: Path

    def changes(self) -> set[tuple[str, str]]:
        """All calls so far that may change something."""
        return {call for call in logged_calls(self.log.read_text()) if call[0] != "GET"}


@pytest.fixture(scope="module")
def server(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StockServer]:
    """One server for all tests; the test of a guest, which needs it unchanged, comes first."""
    logs = tmp_path_factory.mktemp("logs")
    command = f"env {ENVIRONMENT} {os.environ[PYTHON_VARIABLE]} {MODULE} {ARGUMENTS}"
    with launched_server(command, Path(untied(root)), logs) as address:
        (log,) = logs.iterdir()
        yield StockServer(address, log)


def untied(root: Path, seed: int = 0) -> str:
    """The directory of a model with weights for its head, which such a server updates on CPUs."""
    return str(
        ModelStore(root).directory(TinyModel(family="llama", seed=seed, head_size=32, longest=LONGEST))
    )


def test_guest_changes_nothing(server: StockServer, root: Path) -> None:
    engine = build(untied(root), addresses=(server.address,))
    engine.initialize()
    try:
        (response,) = complete(engine, request(5, 8, 2))
        assert response.versions == (0,) * 4
        require_drawn_by(untied(root), response, 0, 4, 1.0)
        require_serves(engine, untied(root))
        refused = "options.take_over = false: an update of weights would change"
        with pytest.raises(ConfigError, match=refused):
            engine.update_weights(WeightUpdateMeta(version=1, path=untied(root, seed=1))).result(20)
        with pytest.raises(ConfigError, match=r"options.take_over = false: pause\(\)"):
            engine.pause()
        require_serves(engine, untied(root))
    finally:
        engine.destroy()
    assert server.changes() == {GENERATE}


def test_requests_in_flight_get_weights_by_disk(server: StockServer, root: Path) -> None:
    for seed in (1, 3):  # the second engine finds the weights of the first
        engine = build(untied(root), addresses=(server.address,), take_over=True)
        engine.initialize()
        try:
            require_serves(engine, untied(root))
            for version, before, new in ((1, 0, seed), (2, seed, seed + 1)):
                meta = WeightUpdateMeta(version=version, path=untied(root, seed=new))
                check_update_in_flight(engine, untied(root, seed=before), untied(root, seed=new), meta)
        finally:
            engine.destroy()


@pytest.mark.parametrize(("method", "transfer"), [("tensor", "ipc"), ("distributed", "nccl")])
def test_updates_without_a_gpu_are_refused(
    server: StockServer, root: Path, tmp_path: Path, method: Literal["tensor", "distributed"], transfer: str
) -> None:
    engine = build(untied(root), addresses=(server.address,), take_over=True)
    engine.initialize()
    try:
        before = server.changes()
        meta = WeightUpdateMeta(method=method, version=1, path=str(tmp_path / "meet"))
        message = (
            f"takes no weights by '{method}': vLLM's own transfer '{transfer}' .*install core-rl-vllm-server"
        )
        with pytest.raises(ConfigError, match=message):
            engine.update_weights(meta).result(20)
        cut = SamplingParams(top_p=0.5, max_new_tokens=2)
        with pytest.raises(RolloutError, match=r"distribution that these have cut: .*top_p = 0.5"):
            complete(engine, LLMRequest(input_ids=(5, 17), sampling=cut))
        assert server.changes() == before
        require_serves(engine, untied(root))
    finally:
        engine.destroy()


def test_worker_on_a_cpu_joins_no_group(server: StockServer) -> None:
    """Where this fails, vLLM transfers weights on CPUs, and the engine should use it."""
    info = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}
    call = urllib.request.Request(
        f"http://{server.address}/init_weight_transfer_engine",
        json.dumps({"init_info": info}).encode(),
        {"Content-Type": "application/json"},
    )
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(call, timeout=120)
    assert "Cannot access accelerator device when none is available" in error.value.read().decode()
