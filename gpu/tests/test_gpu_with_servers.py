"""Real servers on the device of a trainer."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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

LARGEST_GAP = 0.02
"""The mean difference of log-probs between server and trainer, in nats."""


@pytest.mark.gpu(limit_s=900)
def test_sglang(setting: Setting) -> Figures:
    """An SGLang server on the same GPU: requests, sync, mismatch, memory.

    Raises where log-probs differ; not run without a Python that has SGLang.
    """
    _require_module("sglang", "CORE_RL_SGLANG_PYTHON")
    with _pair(setting, "sglang", TINY) as (trainer, server):
        figures = _served(setting, trainer, server)
        free = setting.free_bytes()
        server.release_memory()
        figures["given back, MiB"] = (setting.free_bytes() - free) / 2**20
        server.resume_memory()
    return figures


@pytest.mark.nightly
@pytest.mark.gpu(limit_s=900)
def test_vllm(setting: Setting) -> Figures:
    """A vLLM server on the same GPU: requests, sync, mismatch.

    Raises where log-probs differ; not run without a Python that has vLLM.
    """
    _require_module("vllm", "CORE_RL_VLLM_PYTHON")
    # The smallest heads that vLLM's attention on CPUs has.
    with _pair(setting, "vllm", {**TINY, "head_dim": 32}) as (trainer, server):
        return _served(setting, trainer, server)


def _require_module(name: str, variable: str) -> None:
    python = os.environ.get(variable, sys.executable)
    looked = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({name!r}) is None)"
    if subprocess.run([python, "-c", looked], check=False).returncode:
        raise NotRun(f"{python} has no {name}; name a Python that has it in {variable}")


@contextmanager
def _pair(
    setting: Setting, engine: str, tiny: dict[str, Any]
) -> Iterator[tuple[TrainEngine, InferenceEngine]]:
    """A trainer and a server of ``engine`` of one model, on one device."""
    shape, path = setting.size(QWEN3_0_6B, tiny), str(setting.directory / "model")
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape)).save_pretrained(path)
    values = {
        "model": {"path": path},
        "device": setting.device,
        "dtype": "float32",
        "shares_devices": True,
        "options": {"memory_fraction": 0.3},
    }
    trainer = engine_of(setting, shape, model={"path": path}, optimizer=None, dtype="float32")
    try:
        server = started(InferenceEngine, engine, values)
        try:
            yield trainer, server
        finally:
            server.destroy()
    finally:
        trainer.destroy()


def _served(setting: Setting, trainer: TrainEngine, server: InferenceEngine) -> dict[str, float | str]:
    """Seconds of a sync, requests each second, and the gap of log-probs."""
    figures: dict[str, float | str] = {}
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
        raise RuntimeError(f"server and trainer differ by {gap:.3g} nats; at most {LARGEST_GAP} is explained")
    return figures


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
