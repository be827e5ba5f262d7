"""Memory of the ranks of `real_size.py`: after passes, while they load, and while they export."""

from __future__ import annotations

import argparse
import ctypes
import threading
from contextlib import closing
from pathlib import Path

import torch
from memory_probe import own_bytes, peaks_of
from transformers import AutoConfig, AutoModelForCausalLM

from common.real_sides import LENGTHS, Line
from common.workload import make_batch, token_nll
from core_rl import LossSpec, MicroBatchSpec
from core_rl.backend.meta import SaveLoadMeta, WeightUpdateMeta
from core_rl.engine.train import TrainEngine
from core_rl.launch.group import EngineGroup
from core_rl.state.gather import BUCKET_BYTES
from core_rl.weight_sync.update import weight_update

MIB = 2**20
MMAP_THRESHOLD = -3
"""Of ``mallopt``: M_MMAP_THRESHOLD of malloc.h."""


def equal(arguments: argparse.Namespace) -> list[Line]:
    """Memory of two data-parallel ranks with equally many tokens."""
    batch = make_batch([*LENGTHS, *LENGTHS], AutoConfig.from_pretrained(arguments.model).vocab_size)
    cut = MicroBatchSpec(max_tokens=sum(LENGTHS))
    lines = []
    with _group("fsdp", arguments, {"dp": 2}, trained=True) as group:
        group.initialize()
        for name, call in {
            "a forward pass": lambda: group.forward(batch, cut),
            "a step": lambda: group.train_batch(batch, LossSpec(fn=token_nll), cut),
            "a second step": lambda: group.train_batch(batch, LossSpec(fn=token_nll), cut),
        }.items():
            call()
            resident = [own_bytes(pid) / MIB for pid in group.pids]
            figure = " and ".join(f"{value:,.0f}" for value in resident)
            lines.append(
                Line(f"dp2, MiB of the ranks after {name}", figure, max(resident) / min(resident), 1.05)
            )
    return lines


def load(arguments: argparse.Namespace) -> list[Line]:
    """The peak of a rank while the model is loaded, next to its part of it."""
    return [
        _loaded("fsdp, dp2, no optimizer", "fsdp", {"dp": 2}, arguments, trained=False),
        _loaded("megatron, tp2, no optimizer", "megatron", {"tp": 2}, arguments, trained=False),
        _loaded("megatron, tp2", "megatron", {"tp": 2}, arguments, trained=True),
    ]


def _loaded(
    label: str, engine: str, layout: dict[str, int], arguments: argparse.Namespace, *, trained: bool
) -> Line:
    with _group(engine, arguments, layout, trained=trained) as group:
        with peaks_of(group.pids) as peaks:
            group.initialize()
        resident = [own_bytes(pid) - before for pid, before in zip(group.pids, peaks.before, strict=True)]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(arguments.model))
    count = sum(parameter.numel() for parameter in model.parameters())
    state = group.config.state_bytes(count, count if trained else 0)
    part = state.weights + state.moments
    figure = (
        f"peak {max(peaks.growth) / MIB:,.0f}, kept {max(resident) / MIB:,.0f}, part {part / MIB:,.0f} MiB"
    )
    return Line(f"load, {label}", figure, max(peaks.growth) / part, 1.2)


def export(arguments: argparse.Namespace) -> list[Line]:
    """Memory of an export and a stream on a rank that does not write, in addition to its part.

    Freed memory goes back to the system at once: memory cached by the C library is no copy of the model.
    """
    with _group("fsdp", arguments, {"dp": 2}, trained=True) as group:
        group.initialize()
        group.run(_give_back_at_once)
        with peaks_of(group.pids) as saving:
            group.save(SaveLoadMeta(path=str(arguments.scratch / "export"), format="hf"))
        with peaks_of(group.pids) as sending:
            _stream(group, arguments.scratch / "stream")
    return [
        Line(
            f"{label}, MiB beside two buckets of {BUCKET_BYTES // MIB}",
            f"{growth / MIB:,.0f}",
            growth / (2 * BUCKET_BYTES),
            1.0,
        )
        for label, growth in (("hf export", saving.growth[1]), ("tensor stream", sending.growth[1]))
    ]


def _give_back_at_once(_engine: TrainEngine) -> None:
    assert ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, MIB) == 1


def _stream(group: EngineGroup, path: Path) -> None:
    """Upload to a receiver in this process, which looks at nothing."""
    meta = WeightUpdateMeta(method="tensor", version=1, path=str(path))
    group.set_version(1)

    def receive() -> None:
        with weight_update(meta).receive(60) as weights:
            for _ in weights:
                pass

    receiver = threading.Thread(target=receive)
    receiver.start()
    group.upload_weights(meta)
    receiver.join()


def _group(
    engine: str, arguments: argparse.Namespace, layout: dict[str, int], *, trained: bool
) -> closing[EngineGroup]:
    """The ranks, started and without a model, for a context that closes them."""
    return closing(
        EngineGroup(
            engine,
            model={"path": str(arguments.model)},
            optimizer={"lr": 1e-4, "weight_decay": 0.01} if trained else None,
            layout=layout,
            dtype="bfloat16",
            device="cpu",
            timeout_s=600,
            threads_per_rank=1,
        )
    )
