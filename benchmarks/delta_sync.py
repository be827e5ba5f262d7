"""Bytes and seconds of a delta weight sync next to a full sync, after one AdamW step.

    python benchmarks/delta_sync.py --layers 24 --vocabulary 151936 --lr 1e-6

Weights have the shapes of Qwen2.5-0.5B, in bfloat16, with float32 masters that AdamW moves. The sender and the receiver
are two threads of one process; both sides of each round send the same weights.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from core_rl.backend.meta import SyncMethod, WeightUpdateMeta
from core_rl.checkpoint.directory import write_checkpoint
from core_rl.checkpoint.tensor_files import TensorFiles, write_tensors
from core_rl.distributed.comm import Comm
from core_rl.engine.delta_files import open_delta_update, write_changes
from core_rl.weight_sync.delta import DeltaDecoder, DeltaEncoder
from core_rl.weight_sync.messages import Bucket
from core_rl.weight_sync.update import weight_update

HIDDEN, INNER, KEYS = 896, 4864, 128
METHODS: tuple[SyncMethod, ...] = ("tensor", "distributed", "disk")
TIMEOUT_S = 600.0


def shapes(layers: int, vocabulary: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the weights of Qwen2.5-0.5B with other numbers of layers and tokens."""
    yield "model.embed_tokens.weight", (vocabulary, HIDDEN)
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        for name, rows in (("q", HIDDEN), ("k", KEYS), ("v", KEYS)):
            yield f"{prefix}.self_attn.{name}_proj.weight", (rows, HIDDEN)
            yield f"{prefix}.self_attn.{name}_proj.bias", (rows,)
        yield f"{prefix}.self_attn.o_proj.weight", (HIDDEN, HIDDEN)
        yield f"{prefix}.mlp.gate_proj.weight", (INNER, HIDDEN)
        yield f"{prefix}.mlp.up_proj.weight", (INNER, HIDDEN)
        yield f"{prefix}.mlp.down_proj.weight", (HIDDEN, INNER)
        yield f"{prefix}.input_layernorm.weight", (HIDDEN,)
        yield f"{prefix}.post_attention_layernorm.weight", (HIDDEN,)
    yield "model.norm.weight", (HIDDEN,)


class Policy:
    """Masters in float32, and their copies in bfloat16; each step has random gradients in all places."""

    def __init__(self, layers: int, vocabulary: int, lr: float) -> None:
        torch.manual_seed(0)
        self.masters = {
            name: torch.randn(shape) * 0.02 if len(shape) == 2 else torch.ones(shape)
            for name, shape in shapes(layers, vocabulary)
        }
        self.lr = lr
        self.step()

    def step(self) -> None:
        """The first step of AdamW, whose size is the learning rate in each place."""
        for master in self.masters.values():
            master.add_(torch.randn_like(master).sign_(), alpha=-self.lr)
        self.weights = {name: master.bfloat16() for name, master in self.masters.items()}


def sync(policy: Policy, meta: WeightUpdateMeta, encoder: DeltaEncoder, decoder: DeltaDecoder) -> int:
    """One sync of the present weights, full without ``meta.delta``; returns its bytes."""
    if meta.method == "disk":
        return _by_disk(policy, meta, encoder, decoder)
    sent = []

    def receive() -> None:
        with weight_update(meta, base=decoder.base).receive_copies(TIMEOUT_S) as buckets:
            items = [item for bucket in buckets for item in bucket]
            if meta.delta:
                decoder.commit(decoder.decode(items), meta.version)

    def count(bucket: Bucket) -> None:
        sent.append(sum(tensor.nbytes for _, tensor in bucket))

    stream: Iterator[tuple[str, Tensor | None]] = iter(policy.weights.items())
    with ThreadPoolExecutor(1) as pool:
        arrival = pool.submit(receive)
        base = encoder.base if meta.delta else None
        weight_update(meta, base=base).send(encoder.encode(stream) if meta.delta else stream, on_bucket=count)
        arrival.result(TIMEOUT_S)
    if meta.delta:
        encoder.commit(meta.version)
    return sum(sent)


def _by_disk(policy: Policy, meta: WeightUpdateMeta, encoder: DeltaEncoder, decoder: DeltaDecoder) -> int:
    path, stream = meta.path or "", policy.weights.items()
    full = encoder.base is None or not meta.delta
    if full:
        recorded = encoder.recorded(stream) if meta.delta else stream

        def write(directory: Path) -> None:
            write_tensors(directory, "model", recorded, writes=True)

        write_checkpoint(path, write, Comm(), kind="hf")
    else:
        write_changes(path, encoder.encode(stream), Comm(), is_writer=True)
    if meta.delta:
        encoder.commit(meta.version)
        with open_delta_update(meta) as update:
            decoder.commit(decoder.decode(update.items()), meta.version)
    else:
        files = TensorFiles(Path(path), "model")
        for name in files.names():
            files.read(name)
    return sum(file.stat().st_size for file in Path(path).glob("*.safetensors"))


def timed(work: Callable[[], int]) -> tuple[float, int]:
    """Seconds and bytes of ``work``."""
    started = time.perf_counter()
    count = work()
    return time.perf_counter() - started, count


def _medians(results: Sequence[tuple[float, int]]) -> tuple[float, float]:
    seconds, counts = zip(*results, strict=True)
    return statistics.median(seconds), statistics.median(counts)


def main() -> None:
    """Print the figures of each method."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    options = parser.parse_args()
    policy = Policy(options.layers, options.vocabulary, options.lr)
    parameters = sum(tensor.numel() for tensor in policy.weights.values())
    table = Table(title=f"{parameters / 1e6:,.0f} M parameters in bfloat16, one step at lr {options.lr:g}")
    for column in ("method", "full, MB", "full, s", "full with digests, s", "delta, MB", "delta, s", "bytes"):
        table.add_column(column, justify="left" if column == "method" else "right")
    with TemporaryDirectory() as directory:
        for method in options.methods:
            meta = WeightUpdateMeta(method=method, version=1, path=f"{directory}/{method}", delta=True)
            encoder, decoder = DeltaEncoder(), DeltaDecoder()
            sync(policy, meta, encoder, decoder)
            rows: list[tuple[tuple[float, int], ...]] = []
            for version in range(2, 2 + options.rounds):
                policy.step()
                full = replace(meta, delta=False, version=version)
                sides = (full, replace(full, verify=True), replace(meta, version=version))
                rows.append(tuple(timed(partial(sync, policy, side, encoder, decoder)) for side in sides))
            (plain, size), (verified, _), (delta, changes) = map(_medians, zip(*rows, strict=True))
            table.add_row(
                method, f"{size / 1e6:,.0f}", f"{plain:.2f}", f"{verified:.2f}", f"{changes / 1e6:,.1f}",
                f"{delta:.2f}", f"1 / {size / changes:.0f}",
            )  # fmt: skip
    Console(width=max(110, Console().width)).print(table)


if __name__ == "__main__":
    main()
