"""Real servers: log-probs, scores, weights, versions, and a server that is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from drawn_tokens import (
    LENGTH,
    LONG,
    TOLERANCE,
    check_update_in_flight,
    logprobs_of,
    require_drawn_by,
    require_serves,
)
from server_stub import complete, complete_during
from vllm_support import backend_of, build, tiny_model

from core_rl.backend.meta import WeightUpdateMeta
from core_rl.data.batch import SequenceBatch
from core_rl.data.requests import LLMRequest, SamplingParams
from core_rl.engine.inference import InferenceEngine
from core_rl.errors import WeightsError
from core_rl.weight_sync.cuda import DEVICE, DeviceMemory
from core_rl.weight_sync.update import weight_update
from core_rl_conformance.procedures.streaming import tensors_of
from core_rl_vllm.backend import PYTHON_VARIABLE
from core_rl_vllm.server import on_gpu


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.7},
        {"temperature": 7.0},
        {"temperature": 0.003},
        {"top_p": 0.5},
        {"top_k": 2, "temperature": 1.4},
        {"min_p": 0.3},
        {"temperature": 0.0},
    ],
    ids=str,
)
def test_logprobs_cover_full_distribution(
    engine: InferenceEngine, root: Path, sampling: dict[str, Any]
) -> None:
    params = SamplingParams(max_new_tokens=12, ignore_eos=True, **sampling)
    (response,) = complete(engine, LLMRequest(input_ids=(5, 17, 33), sampling=params))
    assert (len(response.output_ids), response.stop_reason) == (12, "length")
    require_drawn_by(tiny_model(root), response, 0, 12, params.logprob_temperature)


def test_scores_cover_context_and_vocabulary(engine: InferenceEngine, root: Path) -> None:
    require_serves(engine, tiny_model(root))
    row = [5, 8, 2, 9]
    expected = logprobs_of(tiny_model(root), row).float()
    best = engine.top_logprobs(SequenceBatch.from_sequences([row]), expected.shape[1])
    full = torch.zeros_like(expected).scatter(1, best.ids[1:], best.logprobs[1:])
    torch.testing.assert_close(full, expected, atol=TOLERANCE, rtol=0)


def test_a_response_ends_with_the_end_of_sequence(engine: InferenceEngine) -> None:
    params = SamplingParams(max_new_tokens=30, logit_bias=((2, 100.0),))
    (response,) = complete(engine, LLMRequest(input_ids=(5, 17, 33), sampling=params))
    assert (response.output_ids, response.stop_reason) == ((2,), "stop")


@pytest.mark.parametrize("method", ["disk", "tensor", "distributed"])
def test_tokens_carry_their_weight_version(
    engine: InferenceEngine, root: Path, tmp_path: Path, method: Literal["disk", "tensor", "distributed"]
) -> None:
    version = engine.get_version() + 1
    before, new = (tiny_model(root, seed=seed) for seed in (version - 1, version))
    path = new if method == "disk" else str(tmp_path / "meet")
    meta = WeightUpdateMeta(
        method=method, version=version, path=path, bucket_bytes=4096, verify=method != "disk"
    )
    check_update_in_flight(engine, before, new, meta)


@pytest.mark.parametrize("method", ["tensor", "distributed"])
def test_dead_trainer_leaves_old_weights(
    engine: InferenceEngine, root: Path, tmp_path: Path, method: Literal["tensor", "distributed"]
) -> None:
    version = engine.get_version()
    meta = WeightUpdateMeta(method=method, version=99, path=str(tmp_path / "meet"), bucket_bytes=4096)

    def dying() -> Any:
        yield from list(tensors_of(Path(tiny_model(root, seed=7))).items())[:6]
        raise WeightsError("the trainer died")

    arrival = engine.update_weights(meta)
    with pytest.raises(WeightsError, match="the trainer died"):
        weight_update(meta).send(dying())
    with pytest.raises(WeightsError):
        arrival.result(60)
    assert engine.get_version() == version
    require_serves(engine, tiny_model(root, seed=version))


def test_killed_server_recovers_all_requests(engine: InferenceEngine, root: Path) -> None:
    version, process = engine.get_version(), backend_of(engine).servers[0].process
    assert process is not None
    requests = [LLMRequest(input_ids=(1, 2, number), sampling=LONG) for number in range(4)]
    actual = complete_during(engine, lambda: os.kill(process.pid, signal.SIGKILL), *requests)
    assert process is not backend_of(engine).servers[0].process
    assert {(len(response.output_ids), response.stop_reason) for response in actual} == {(LENGTH, "length")}
    assert {drawn for response in actual for drawn in response.versions} == {version}
    require_serves(engine, tiny_model(root, seed=version))


OPEN = """
import json, sys, types
import torch
from core_rl_vllm_server import transfer
torch.cuda.device_count = lambda: 2
torch.cuda.get_device_properties = lambda number: types.SimpleNamespace(uuid=f"gpu-{number}")
transfer.rebuild_cuda_tensor = lambda *arguments: arguments
print(transfer._on_gpu(transfer.Bucket(tensors=[], **json.load(sys.stdin))))
"""


def test_vllm_opens_gpu_memory() -> None:
    """The GPU is found by its UUID. Nothing is opened here."""
    storage = (torch.storage.TypedStorage, torch.uint8, "gpu-1", b"handle", 128, 64)
    memory = DeviceMemory(
        (torch.Tensor, torch.Size([96]), (1,), 0, *storage, False, b"\xff", 8, b"event", True)
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    actual = subprocess.run(
        [os.environ[PYTHON_VARIABLE], "-c", OPEN],
        input=json.dumps(on_gpu(memory)),
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    expected = (*memory.arguments[:DEVICE], 1, *memory.arguments[DEVICE + 1 :])
    assert actual.stdout.splitlines()[-1:] == [repr(expected)], actual.stderr[-2000:]


@pytest.mark.nightly
def test_two_servers_form_an_engine(root: Path) -> None:
    engine = build(tiny_model(root), dp=2)
    try:
        engine.initialize()
        require_serves(engine, tiny_model(root))
    finally:
        engine.destroy()
