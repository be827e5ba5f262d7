"""Servers on the machines of a cluster. A local Ray and a script for vLLM stand for them here."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripted_server import LABEL, MODEL, gone, scripted_server
from server_stub import complete, request, wait_for
from vllm_support import backend_of, build, tiny_model

from core_rl.launch.machines import server_processes
from core_rl_cluster import RayHosts

pytestmark = pytest.mark.nightly

CHOICE = {
    "token_ids": [7, 7],
    "finish_reason": "length",
    "logprobs": {"content": [{"token_id": 7, "logprob": -0.5}] * 2},
    "weight_versions": [{"version": LABEL, "start": 0, "end": 2}],
}
RESPONSES = {
    "/weight_info": {"weight_version": "default"},
    "/get_world_size?include_dp=false": {"world_size": 1},
    "/v1/models": {"data": [{"root": MODEL}]},
    "/version": {"version": "0.32.0"},
    "/inference/v1/generate": {"choices": [CHOICE]},
}


def test_servers_end_with_engine_on_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORE_RL_TEST_VLLM_KEY", "a secret")
    python = scripted_server(tmp_path, RESPONSES, "--model")
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=2, include_dashboard=False)
    with RayHosts(1, 1) as hosts:
        engine = build(
            tiny_model(tmp_path), api_key="${env:CORE_RL_TEST_VLLM_KEY}", python=python, private_network=True
        )
        try:
            engine.initialize(engine.launch_server(processes=server_processes(hosts, 1)))
            (response,) = complete(engine, request(1, 2, max_new_tokens=2))
            assert response.output_ids == (7, 7)
            process = backend_of(engine).servers[0].process
            assert process is not None
            pid = process.pid
        finally:
            engine.destroy()
        wait_for(lambda: gone(pid))
    ray.shutdown()
