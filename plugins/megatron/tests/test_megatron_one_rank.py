"""One rank: a pass that raises inside Megatron's schedule, and memory after the end."""

from __future__ import annotations

import gc
import math
import weakref
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import megatron_support as support
import pytest
import torch

from core_rl.backend.loss import LossSpec
from core_rl.checkpoint.tensor_files import SafetensorsFile
from core_rl.config.engine import ModelConfig, TrainEngineConfig
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.engine.loading import load_engine
from core_rl.engine.train import TrainEngine
from core_rl.errors import OutOfDeviceMemory
from core_rl_conformance.inputs.tiny_models import ModelStore, TinyModel
from core_rl_megatron.backend import MegatronBackend

LOSS = LossSpec(fn=support.weighted_nll)
CUT = MicroBatchSpec(max_tokens=24)
CONFIGS = [
    support.config(),
    support.config(
        options={"distributed_optimizer": True, "overlap_param_gather": True, "ddp_bucket_size": 2000}
    ).model_copy(update={"dtype": "bfloat16"}),
]
IDS = ["float32", "bfloat16-distributed-optimizer"]
EXPERTS = support.config(
    model={
        "model_type": "qwen3_moe",
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "tie_word_embeddings": False,
    }
)


class _OutOfMemory(RuntimeError):
    pass


class _FailsOnce:
    """A hook that raises in the second micro-batch that it sees."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        self.calls += 1
        if self.calls == 2:
            raise _OutOfMemory


def results(engine: TrainEngine) -> list[float]:
    actual = []
    with engine.train_mode():
        for seed in range(2):
            metrics = engine.train_batch(support.batch(seed), LOSS, CUT)
            actual += [metrics["loss"], metrics["grad_norm"]]
    return actual


@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_raising_pass_leaves_no_state(config: TrainEngineConfig) -> None:
    actual = []
    for failing in (False, True):
        engine = load_engine("megatron", config)
        engine.initialize()
        with ExitStack() as stack:
            stack.callback(engine.destroy)
            if failing:
                assert isinstance(engine.backend, MegatronBackend)
                hook = engine.backend.model.chunks[0].register_forward_pre_hook(_FailsOnce())
                with engine.train_mode(), pytest.raises(_OutOfMemory):
                    engine.train_batch(support.batch(5), LOSS, CUT)
                hook.remove()
            actual.append(results(engine))
    assert actual[0] == actual[1]


@pytest.mark.parametrize("config", [*CONFIGS, EXPERTS], ids=[*IDS, "experts"])
def test_a_destroyed_engine_leaves_no_model_in_memory(config: TrainEngineConfig) -> None:
    """Also before Python's collector runs, which may be hundreds of engines later."""
    engine = load_engine("megatron", config)
    engine.initialize()
    results(engine)
    assert isinstance(engine.backend, MegatronBackend)
    left = weakref.ref(engine.backend.wrapped[0])
    gc.disable()
    try:
        engine.destroy()
        del engine
        assert left() is None
    finally:
        gc.enable()


def test_destroyed_engines_leave_no_threads(tmp_path: Path) -> None:
    """Destroy the 17 process groups of an engine; groups of all ranks may belong to another engine or torchrun."""
    store = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        threads = []
        for _ in range(2):
            engine = load_engine("megatron", CONFIGS[0])
            engine.initialize()
            engine.destroy()
            threads.append(len(list(Path("/proc/self/task").iterdir())))
        assert threads[0] == threads[1]
    finally:
        torch.distributed.destroy_process_group()


def test_device_memory_is_checked_before_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU there is nothing to ask; that it is asked there shows the moment."""
    directory = ModelStore(tmp_path).directory(TinyModel(family="qwen3", seed=0))
    config = support.config().model_copy(update={"model": ModelConfig(path=str(directory))})
    engine, read = load_engine("megatron", config), list[str]()

    def full(context: object, model: torch.nn.Module) -> None:
        raise OutOfDeviceMemory(f"{sum(p.numel() for p in model.parameters())} weights, read: {read}")

    monkeypatch.setattr("core_rl_megatron.backend.require_device_memory", full)
    monkeypatch.setattr(SafetensorsFile, "read", lambda self, name, slices=None: read.append(name))
    with pytest.raises(OutOfDeviceMemory, match=r"^[1-9]\d+ weights, read: \[\]$"):
        engine.initialize()


def test_optimizer_is_always_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adam of TransformerEngine and Apex has no count of steps for each parameter, which a resumed run sets."""
    monkeypatch.setattr("megatron.core.optimizer.USING_PYTORCH_OPTIMIZER", False)
    monkeypatch.setattr("megatron.core.optimizer.Adam", _Foreign)
    engine = load_engine("megatron", CONFIGS[0])
    engine.initialize()
    try:
        assert all(map(math.isfinite, results(engine)))
    finally:
        engine.destroy()


class _Foreign:
    def __init__(self, **_: Any) -> None:
        raise AssertionError("an optimizer that is not torch's")
