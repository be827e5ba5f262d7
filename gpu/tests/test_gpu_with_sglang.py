"""A real SGLang server on the device of a trainer."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time

import pytest
from gpu_models import QWEN3_0_6B, TINY, engine_of, started
from gpu_points import Figures, NotRun, Setting
from transformers import AutoConfig, AutoModelForCausalLM

from core_rl.backend.meta import WeightUpdateMeta
from core_rl.data.batch import SequenceBatch
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.data.requests import LLMRequest, LLMResponse, SamplingParams
from core_rl.engine.inference import InferenceEngine
from core_rl.engine.sync import sync_weights
from core_rl.engine.train import TrainEngine

PYTHON = "CORE_RL_SGLANG_PYTHON"
LARGEST_GAP = 0.02
"""The mean difference of log-probs between server and trainer, in nats."""


@pytest.mark.slow
@pytest.mark.gpu(limit_s=900)
def test_sglang(setting: Setting) -> Figures:
    """A server on the same GPU: requests, sync, mismatch, memory.

    Raises where log-probs differ; not run without a Python that has SGLang.
    """
    _require_sglang()
    shape, path = setting.size(QWEN3_0_6B, TINY), str(setting.directory / "model")
    config = AutoConfig.for_model(**shape)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    trainer = engine_of(setting, shape, model={"path": path}, optimizer=None, dtype="float32")
    server = _server(setting, path)
    figures: dict[str, float | str] = {}
    try:
        meta = WeightUpdateMeta(method="tensor", version=1, path=str(setting.directory / "meet"))
        start = time.perf_counter()
        sync_weights(trainer, server, meta, 600.0)
        figures["sync by tensor, s"] = time.perf_counter() - start
        count = setting.size(1500, 12)
        start = time.perf_counter()
        responses = asyncio.run(_responses(server, count))
        figures["requests/s"] = count / (time.perf_counter() - start)
        figures["mean gap, nats"] = gap = _gap(trainer, responses)
        if gap > LARGEST_GAP:
            raise RuntimeError(
                f"server and trainer differ by {gap:.3g} nats; at most {LARGEST_GAP} is explained"
            )
        free = setting.free_bytes()
        server.release_memory()
        figures["given back, MiB"] = (setting.free_bytes() - free) / 2**20
        server.resume_memory()
    finally:
        server.destroy()
        trainer.destroy()
    return figures


def _require_sglang() -> None:
    python = os.environ.get(PYTHON, sys.executable)
    looked = "import importlib.util, sys; sys.exit(importlib.util.find_spec('sglang') is None)"
    if subprocess.run([python, "-c", looked], check=False).returncode:
        raise NotRun(f"{python} has no SGLang; name a Python that has it in {PYTHON}")


def _server(setting: Setting, path: str) -> InferenceEngine:
    values = {
        "model": {"path": path},
        "device": setting.device,
        "dtype": "float32",
        "shares_devices": True,
        "options": {"memory_fraction": 0.3},
    }
    return started(InferenceEngine, "sglang", values)


async def _responses(server: InferenceEngine, count: int) -> list[LLMResponse]:
    requests = [
        LLMRequest(
            input_ids=(1, 2, 3 + number % 200), sampling=SamplingParams(max_new_tokens=16, seed=number)
        )
        for number in range(count)
    ]
    return list(await asyncio.gather(*map(server.agenerate, requests)))


def _gap(trainer: TrainEngine, responses: list[LLMResponse]) -> float:
    batch = SequenceBatch.from_sequences([[*r.input_ids, *r.output_ids] for r in responses])
    logprobs = trainer.forward(batch, MicroBatchSpec(max_tokens=16_384))["logprobs"]
    starts, gaps = batch.cu_seqlens.tolist(), list[float]()
    for response, start in zip(responses, starts, strict=False):
        first = start + len(response.input_ids)
        local = logprobs[first : first + len(response.output_ids)].tolist()
        gaps += [abs(a - b) for a, b in zip(local, response.logprobs, strict=True)]
    return sum(gaps) / len(gaps)
