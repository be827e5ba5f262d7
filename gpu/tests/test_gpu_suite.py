"""The conformance suite on the GPU, and equal bits of two equal steps."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest
import torch
from gpu_models import LOSS, QWEN3_0_6B, TINY, batch_of, engine_of
from gpu_points import Figures, NotRun, Setting, deterministic

from core_rl.backend.meta import SaveLoadMeta
from core_rl.data.micro_batch import MicroBatchSpec

REHEARSED = ["--check=I7.logprobs", "--quick"]


@pytest.mark.nightly
@pytest.mark.gpu(limit_s=900)
def test_suite_float32(setting: Setting) -> Figures:
    """The suite on fsdp, float32.

    Raises where a check fails.
    """
    return _suite(setting, "fsdp", "float32")


@pytest.mark.nightly
@pytest.mark.gpu(limit_s=900)
def test_suite_bfloat16(setting: Setting) -> Figures:
    """The suite on fsdp, bfloat16; bits of two equal steps.

    Raises where a check fails.
    """
    figures = dict(_suite(setting, "fsdp", "bfloat16"))
    figures["two equal steps have equal bits"] = _repeats(setting)
    with deterministic():
        figures["the same, deterministic algorithms"] = _repeats(setting)
    return figures


@pytest.mark.nightly
@pytest.mark.gpu(limit_s=900)
def test_megatron(setting: Setting) -> Figures:
    """The suite on megatron, and memory while it saves.

    Raises where a check fails; not run where Megatron-Core is not installed.
    """
    if importlib.util.find_spec("megatron") is None:
        raise NotRun("megatron-core is not installed: pip install 'core-rl[megatron]'")
    figures = dict(_suite(setting, "megatron", "float32"))
    shape = setting.size(QWEN3_0_6B, TINY)
    engine = engine_of(setting, shape, "megatron")
    engine.train_batch(batch_of(setting, shape["vocab_size"], 256), LOSS, MicroBatchSpec(count=1))
    meta = SaveLoadMeta(path=str(setting.directory / "sharded"), format="sharded")
    figures["save, peak, MiB"] = setting.peak_mib(lambda: engine.save(meta))
    engine.destroy()
    return figures


def _suite(setting: Setting, engine: str, dtype: str) -> Figures:
    report = setting.directory / f"{engine}-{dtype}.json"
    command = [sys.executable, "-m", "pytest", f"--engine={engine}", "--pyargs", "core_rl_conformance"]
    command += ["--layout=dp1", f"--dtype={dtype}", f"--device={setting.device}", f"--report={report}", "-q"]
    command += [*setting.size(list[str](), REHEARSED), "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=setting.directory, capture_output=True, text=True, check=False)
    sys.stdout.write(done.stdout + done.stderr)
    if not report.exists():
        raise RuntimeError(f"the session ended with {done.returncode}, without a report; see the log")
    results = json.loads(report.read_text())["results"]
    outcomes = [result["outcome"] for result in results]
    failed = sorted({result["check"] for result in results if result["outcome"] == "failed"})
    if failed or done.returncode:
        raise RuntimeError(f"{len(failed)} checks failed: {', '.join(failed) or 'see the log'}")
    return {"passed": outcomes.count("passed"), "not run": outcomes.count("not_run")}


def _repeats(setting: Setting) -> str:
    """Whether the gradients of two equal passes are equal bit for bit."""
    shape = setting.size(QWEN3_0_6B, TINY)
    engine = engine_of(setting, shape)
    batch, sums = batch_of(setting, shape["vocab_size"], 512), list[dict[str, int]]()
    for _ in range(2):
        engine.optimizer_zero_grad()
        engine.forward_backward(batch, LOSS, MicroBatchSpec(count=1))
        grads = engine.named_tensors("grads")
        sums.append(
            {name: int(g.view(torch.int32).sum(dtype=torch.int64)) for name, g in grads if g is not None}
        )
    engine.destroy()
    return "yes" if sums[0] == sums[1] else "no"
