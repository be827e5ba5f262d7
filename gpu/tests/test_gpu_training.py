"""Training steps of the engine ``fsdp``: what waits for the GPU, utilisation, offloading and checkpoints."""

from __future__ import annotations

import math
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_models import (
    LOSS,
    PEAKS,
    QWEN3_0_6B,
    QWEN3_1_7B,
    QWEN3_8B,
    TINY,
    batch_of,
    engine_of,
    group_of,
    model_flops,
)
from gpu_points import Figures, Setting, deterministic
from torch import nn
from transformers import AutoModelForCausalLM

from core_rl.backend.meta import SaveLoadMeta, TensorKind
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.data.prefixes import PrefixTree
from core_rl.engine.train import TrainEngine

EIGHT_LAYERS = {**QWEN3_8B, "num_hidden_layers": 8}
"""8B with 8 of its 36 layers, so that its state fits on one GPU."""
RATIOS = {"4:1": (2048, 512), "1:1": (1024, 1024), "1:4": (384, 1536)}
"""Tokens of a prompt and of a completion."""
WAYS = ("packed", "shared")


@pytest.mark.gpu(limit_s=300)
def test_syncs(setting: Setting) -> Figures:
    """Waits for the GPU inside of a training step.

    Raises where the CPU waits for the GPU inside of a block; what waits elsewhere is listed.
    """
    shape = setting.size(QWEN3_0_6B, TINY)
    engine = engine_of(setting, shape)
    tokens = setting.size(8192, 256)
    batch, spec = batch_of(setting, shape["vocab_size"], tokens), MicroBatchSpec(count=2)
    engine.train_batch(batch, LOSS, spec)
    watch = _Waits(engine)
    with watch.active(setting):
        engine.train_batch(batch, LOSS, spec)
    engine.destroy()
    if watch.inside:
        raise RuntimeError(f"inside of blocks: {dict(watch.inside)}")
    return {"waits in a step": sum(watch.outside.values()), "where": "; ".join(watch.outside) or "nowhere"}


class _Waits:
    """Counts warnings of ``torch.cuda.set_sync_debug_mode`` by the line that waited."""

    def __init__(self, engine: TrainEngine) -> None:
        self.inside: Counter[str] = Counter()
        self.outside: Counter[str] = Counter()
        self._depth = 0
        model = getattr(engine.backend, "model", None)
        assert isinstance(model, nn.Module)
        for module in model.modules():
            if "DecoderLayer" in type(module).__name__:
                module.register_forward_pre_hook(self._enter)
                module.register_forward_hook(self._leave)

    def _enter(self, *_: object) -> None:
        self._depth += 1

    def _leave(self, *_: object) -> None:
        self._depth -= 1

    @contextmanager
    def active(self, setting: Setting) -> Iterator[None]:
        """Inside the context, waits are counted."""
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = self._note  # type: ignore[assignment]
            if setting.device == "cuda":
                torch.cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                if setting.device == "cuda":
                    torch.cuda.set_sync_debug_mode("default")

    def _note(self, *_: object) -> None:
        frames = [frame for frame in traceback.extract_stack()[:-1] if "/core_rl" in frame.filename]
        where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "elsewhere"
        (self.inside if self._depth else self.outside)[where] += 1


@pytest.mark.gpu(limit_s=900)
def test_utilisation(setting: Setting) -> Figures:
    """Model FLOPs utilisation of training steps.

    Of two shapes, with blocks compiled and not.
    """
    figures: dict[str, float | str] = {}
    shapes = setting.size({"0.6B": QWEN3_0_6B, "8B, 8 layers": EIGHT_LAYERS}, {"tiny": TINY})
    for name, shape in shapes.items():
        for compiled in setting.size((False, True), (False,)):
            engine = engine_of(setting, shape, options={"compile": compiled})
            tokens = setting.size(16_384, 256)
            batch, spec = (
                batch_of(setting, shape["vocab_size"], 2 * tokens),
                MicroBatchSpec(max_tokens=tokens),
            )

            def step(engine: TrainEngine = engine, batch: Any = batch, spec: Any = spec) -> None:
                engine.train_batch(batch, LOSS, spec)

            spent = setting.milliseconds(step)
            subject = f"{name}{', compiled' if compiled else ''}"
            speed = model_flops(shape, batch.lengths) / (spent / 1e3)
            figures[f"{subject}: step, ms"] = spent
            figures[f"{subject}: tokens/s"] = batch.num_tokens / (spent / 1e3)
            figures[f"{subject}: TFLOP/s"] = speed / 1e12
            if setting.device == "cuda":
                device = torch.cuda.get_device_name()
                figures |= {f"{subject}: MFU, %": 100 * speed / p for n, p in PEAKS.items() if n in device}
            figures[f"{subject}: peak, MiB"] = setting.peak_mib(step)
            engine.destroy()
    return figures


@pytest.mark.gpu(limit_s=300)
def test_shared_prefixes(setting: Setting) -> Figures:
    """A group of 8 whose prompt is computed once, next to packed sequences.

    Seconds and peak memory of a pass for log-probs and of an update, for long and for short prompts.
    """
    shape = setting.size(QWEN3_0_6B, TINY)
    engine = engine_of(setting, shape)
    figures: dict[str, float | str] = {}
    budget = setting.size(16_384, 512)
    specs = {way: MicroBatchSpec(max_tokens=budget, share_prefixes=way == "shared") for way in WAYS}
    for ratio, lengths in setting.size(RATIOS, {"4:1": (16, 4)}).items():
        batch = group_of(shape["vocab_size"], *lengths)
        tree = PrefixTree.of(batch)
        assert tree is not None
        figures[f"{ratio}: tokens"] = batch.num_tokens
        figures[f"{ratio}: computed tokens, shared / packed"] = len(tree.kept) / batch.num_tokens
        for part, step in {
            "log-probs": lambda spec, batch=batch: engine.forward(batch, spec),
            "update": lambda spec, batch=batch: engine.train_batch(batch, LOSS, spec),
        }.items():
            spent = {way: setting.milliseconds(partial(step, spec), 3) for way, spec in specs.items()}
            peak = {way: setting.peak_mib(partial(step, spec)) for way, spec in specs.items()}
            figures |= {f"{ratio}: {part}, {way}, ms": spent[way] for way in WAYS}
            figures |= {f"{ratio}: {part}, {way}, peak, MiB": peak[way] for way in WAYS}
            figures[f"{ratio}: {part}, time, shared / packed"] = spent["shared"] / spent["packed"]
    engine.destroy()
    return figures


@pytest.mark.gpu(limit_s=300)
def test_offload(setting: Setting) -> Figures:
    """Memory that offloading gives back, and bits afterwards.

    Raises where contents change, or less than 90 % of the state comes back as free memory.
    """
    shape = setting.size(QWEN3_1_7B, TINY)
    engine = engine_of(setting, shape)
    engine.train_batch(batch_of(setting, shape["vocab_size"], 256), LOSS, MicroBatchSpec(count=1))
    before, state = _bits(engine), _state_bytes(engine)
    free = setting.free_bytes()
    start = time.perf_counter()
    engine.offload()
    away_s, gained = time.perf_counter() - start, setting.free_bytes() - free
    start = time.perf_counter()
    engine.onload()
    back_s = time.perf_counter() - start
    if _bits(engine) != before:
        raise RuntimeError("weights or moments are others after offload() and onload()")
    if setting.device == "cuda" and gained < 0.9 * state:
        raise RuntimeError(f"offload() frees {gained / 2**20:.0f} MiB of {state / 2**20:.0f} MiB")
    engine.destroy()
    return {
        "state, MiB": state / 2**20,
        "given back, MiB": gained / 2**20,
        "away, s/GiB": away_s / (state / 2**30),
        "back, s/GiB": back_s / (state / 2**30),
    }


KINDS: tuple[TensorKind, ...] = ("master", "exp_avg", "exp_avg_sq")


def _bits(engine: TrainEngine) -> dict[str, int]:
    """A sum of the bits of each tensor."""
    return {
        f"{kind} {name}": int(value.float().contiguous().view(torch.int32).sum(dtype=torch.int64))
        for kind in KINDS
        for name, value in engine.named_tensors(kind)
        if value is not None
    }


def _state_bytes(engine: TrainEngine) -> int:
    """Bytes of the float32 weights and moments."""
    return 4 * sum(math.prod(shape) for kind in KINDS for shape in engine.tensor_shapes(kind).values())


@pytest.mark.gpu(limit_s=600)
def test_checkpoints(setting: Setting) -> Figures:
    """Saving, loading, the next step, and an export.

    Raises where the step after a load differs from the step after the save, or transformers cannot read an export.
    """
    shape = setting.size(QWEN3_0_6B, TINY)
    engine = engine_of(setting, shape)
    batch, spec = batch_of(setting, shape["vocab_size"], 512), MicroBatchSpec(count=1)
    engine.train_batch(batch, LOSS, spec)
    gib = _state_bytes(engine) / 2**30
    meta = SaveLoadMeta(path=str(setting.directory / "sharded"), format="sharded")
    figures: dict[str, float | str] = {"sharded save, s/GiB": _seconds(lambda: engine.save(meta)) / gib}
    with deterministic():  # FlashAttention adds up gradients of queries in any order otherwise
        expected = engine.train_batch(batch, LOSS, spec)
        figures["sharded load, s/GiB"] = _seconds(lambda: engine.load(meta)) / gib
        metrics = engine.train_batch(batch, LOSS, spec)
    names = ("loss", "grad_norm", "lr")
    if any(metrics[name] != expected[name] for name in names):
        raise RuntimeError(
            f"after a load the next step gives {[metrics[n] for n in names]}, not {[expected[n] for n in names]}"
        )
    exported = SaveLoadMeta(path=str(setting.directory / "hf"), format="hf", with_optimizer=False)
    figures["export, s"] = _seconds(lambda: engine.save(exported))
    engine.destroy()
    AutoModelForCausalLM.from_pretrained(exported.path)
    return figures


def _seconds(work: Any) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
