"""Real servers: launched, killed, replaced and stopped."""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from server_stub import complete, complete_during, dying_stream, wait_for
from sglang_support import backend_of, build, tiny_model

from core_rl.backend.meta import SyncMethod, WeightUpdateMeta
from core_rl.data.batch import SequenceBatch
from core_rl.data.requests import LLMRequest, LLMResponse, SamplingParams
from core_rl.engine.inference import InferenceEngine
from core_rl.errors import CoreRLError, RolloutError, WeightsError
from core_rl.servers.process import RunningServer
from core_rl.weight_sync.cuda import DeviceMemory, Opened
from core_rl.weight_sync.update import weight_update
from core_rl_conformance.procedures.streaming import tensors_of
from core_rl_oracle.low_rank import LowRank
from core_rl_oracle.oracle import Oracle
from core_rl_sglang.backend import flattened_bucket
from core_rl_sglang.process import PYTHON_VARIABLE, SCRIPT

BATCH = SequenceBatch.from_sequences([[5, 8, 2, 9, 11], [7, 1, 150], list(range(60))])
LENGTH = 300
"""Tokens of requests that are in flight while something happens."""
LONG = SamplingParams(max_new_tokens=LENGTH, ignore_eos=True)


def server_process(engine: InferenceEngine) -> RunningServer:
    process = backend_of(engine).servers[0].process
    assert process is not None
    return process


def pid_of(engine: InferenceEngine) -> int:
    return server_process(engine).pid


def processes(group: int) -> list[str]:
    """The running processes of a process group."""
    actual = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, local = file.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(local) == group and state != "Z":
            actual.append(file.parent.name)
    return actual


def logprobs(model: str, low_rank: LowRank | None, row: list[int]) -> torch.Tensor:
    """Log-probs of the tokens of ``row``, 0 for the first."""
    oracle = Oracle(Path(model), "lm", low_rank)
    with torch.no_grad():
        logits = oracle.model(input_ids=torch.tensor([row])).logits[0, :-1]
    selected = torch.log_softmax(logits, -1).gather(1, torch.tensor(row[1:])[:, None]).squeeze(1)
    return torch.cat([torch.zeros(1, dtype=selected.dtype), selected]).float()


def require_serves(engine: InferenceEngine, model: str, low_rank: LowRank | None = None) -> None:
    """The log-probs of ``BATCH`` by ``model``."""
    rows = [row.tolist() for row in BATCH.input_ids.split(BATCH.lengths)]
    expected = torch.cat([logprobs(model, low_rank, row) for row in rows])
    torch.testing.assert_close(engine.score(BATCH), expected, atol=5e-5, rtol=0)


def asked(
    engine: InferenceEngine, count: int, meanwhile: Callable[[], None] | None = None
) -> list[LLMResponse]:
    requests = [LLMRequest(input_ids=(1, 2, 3, number), sampling=LONG) for number in range(count)]
    return complete_during(engine, meanwhile, *requests) if meanwhile else complete(engine, *requests)


def grouped(version: int, tmp_path: Path) -> WeightUpdateMeta:
    point = str(tmp_path / "meet")
    return WeightUpdateMeta(method="distributed", version=version, path=point, bucket_bytes=4096, verify=True)


def test_killed_server_recovers_broadcast_weights(
    engine: InferenceEngine, root: Path, tmp_path: Path
) -> None:
    new, meta = tiny_model(root, seed=1), grouped(4, tmp_path)
    arrival = engine.update_weights(meta)
    weight_update(meta).send(iter(tensors_of(Path(new)).items()))
    arrival.result(60)
    require_serves(engine, new)
    before = pid_of(engine)
    actual = asked(engine, 16, lambda: os.kill(before, signal.SIGKILL))
    assert len({response.rid for response in actual}) == 16
    assert {(len(response.output_ids), response.stop_reason) for response in actual} == {(LENGTH, "length")}
    assert {version for response in actual for version in response.versions} == {4}
    assert pid_of(engine) != before
    assert not processes(before)
    require_serves(engine, new)


@pytest.mark.nightly
def test_server_killed_in_update_recovers_new_weights(
    engine: InferenceEngine, root: Path, tmp_path: Path
) -> None:
    new = tiny_model(root, seed=2)
    meta = WeightUpdateMeta(method="tensor", version=6, path=str(tmp_path / "meet"), bucket_bytes=4096)
    arrival = engine.update_weights(meta)

    def killing() -> Iterator[tuple[str, torch.Tensor]]:
        for number, item in enumerate(tensors_of(Path(new)).items()):
            if number == 5:
                os.kill(pid_of(engine), signal.SIGKILL)
                wait_for(lambda: not server_process(engine).alive)
            yield item

    weight_update(meta).send(killing())
    arrival.result(120)
    assert engine.get_version() == 6
    require_serves(engine, new)
    assert {version for response in asked(engine, 4) for version in response.versions} == {6}


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["tensor", "distributed"])
def test_dead_trainer_changes_nothing(
    engine: InferenceEngine, root: Path, tmp_path: Path, method: SyncMethod
) -> None:
    before, served = engine.get_version(), engine.score(BATCH)
    meta = WeightUpdateMeta(method=method, version=9, path=str(tmp_path / "meet"), bucket_bytes=4096)
    arrival = engine.update_weights(meta)
    with pytest.raises(WeightsError, match="the trainer died"):
        weight_update(meta).send(dying_stream(tiny_model(root, seed=3)))
    with pytest.raises(WeightsError):
        arrival.result(60)
    assert engine.get_version() == before
    # A few units in the last place: the server batches sequences as they arrive, and sums are then rounded otherwise.
    torch.testing.assert_close(
        engine.score(BATCH), served, atol=1e-6, rtol=8 * torch.finfo(torch.float32).eps
    )


@pytest.mark.nightly
def test_the_key_is_asked_for(engine: InferenceEngine, root: Path) -> None:
    intruder = build(tiny_model(root), addresses=(backend_of(engine).servers[0].address,), start_timeout_s=5)
    with pytest.raises(RolloutError, match="401"):
        intruder.initialize()


def test_interrupted_launch_leaves_no_process(root: Path) -> None:
    engine = build(tiny_model(root))
    failures: list[CoreRLError] = []

    def launch() -> None:
        try:
            engine.launch_server()
        except CoreRLError as error:
            failures.append(error)

    launching = threading.Thread(target=launch)
    launching.start()
    wait_for(lambda: backend_of(engine).servers and len(processes(pid_of(engine))) > 1, 120)
    group = pid_of(engine)
    os.killpg(group, signal.SIGKILL)
    launching.join(30)
    engine.destroy()
    assert "was killed by SIGKILL" in str(failures[0])
    assert not processes(group)


@pytest.mark.nightly
def test_early_server_exit_reports_log(root: Path) -> None:
    engine = build(tiny_model(root), extra_args=("--no-such-option",))
    with pytest.raises(
        RolloutError, match=r"(?s)SGLang server 127.0.0.1:\d+ .*the end of its log:.*no-such-option"
    ):
        engine.launch_server()
    group = pid_of(engine)
    engine.destroy()
    assert not processes(group)


UNPICKLE = """
import runpy, sys
runpy.run_path(sys.argv[1], run_name="serve")["apply_workarounds"]()
from torch.multiprocessing import reductions
from sglang.srt.utils import patch_torch
from sglang.srt.utils.common import MultiprocessingSerializer
patch_torch.monkey_patch_torch_reductions()
patch_torch._device_from_maybe_uuid = lambda uuid: uuid + " as a number"
reductions._rebuild_cuda_tensor_original = lambda *arguments: arguments[4:10]
found = MultiprocessingSerializer.deserialize(sys.stdin.read())
print(found["flattened_tensor"])
print([(part.name, part.start_idx, part.end_idx) for part in found["metadata"]])
"""


def test_sglang_unpickles_gpu_bucket() -> None:
    """Find the GPU by its UUID in SGLang's unpickler, which refuses most names. Nothing is opened here."""
    flat = torch.zeros(128, dtype=torch.uint8)
    bucket = [("a", flat[:8].view(torch.float32)), ("b", flat[64:72].view(torch.bfloat16))]
    storage = (torch.storage.TypedStorage, torch.uint8, "a UUID", b"handle", 128, 0)
    counter = (False, b"counter", 0, b"event", True)
    memory = DeviceMemory((torch.Tensor, flat.size(), (1,), 0, *storage, *counter))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    actual = subprocess.run(
        [os.environ[PYTHON_VARIABLE], "-c", UNPICKLE, str(SCRIPT)],
        input=base64.b64encode(flattened_bucket(bucket, Opened(memory))).decode(),
        env={**environment, "SGLANG_USE_CPU_ENGINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    storage_found, metadata = actual.stdout.splitlines()[-2:]
    assert "torch.uint8, 'a UUID as a number', b'handle', 128, 0)" in storage_found, actual.stderr[-2000:]
    assert metadata == "[('a', 0, 8), ('b', 64, 72)]"
