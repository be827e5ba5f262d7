"""Model FLOPs utilisation of a training step of the ``fsdp`` engine, on layers of published shapes.

    python benchmarks/utilisation.py --shape qwen3-0.6b
    python benchmarks/utilisation.py --shape qwen3-8b --layers 12
    python benchmarks/utilisation.py --shape tiny --device cpu --tokens 2048

Model FLOPs are what forward and backward of the model need, three times the forward pass:
2 for each weight of a matrix and token, and for causal attention 2 x heads x head size x length of the
sequence for each token and layer. Recomputation does not count.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu/tests"))
sys.path.insert(0, str(Path(__file__).parent))

import torch
from common.engine import engine_step, start_engine
from common.measure import Side, interleave, spread
from common.workload import MODEL, make_batch, skewed_lengths
from gpu_models import PEAKS, QWEN3_0_6B, QWEN3_8B, model_flops

from core_rl.data.batch import SequenceBatch

SHAPES: dict[str, dict[str, Any]] = {"qwen3-0.6b": QWEN3_0_6B, "qwen3-8b": QWEN3_8B, "tiny": MODEL}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has, to fit in memory")
    parser.add_argument("--tokens", type=int, default=16_384, help="of one packed micro-batch")
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--longest", type=int, default=4096, help="tokens of the longest sequence")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true", help="compile the blocks")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations")
    arguments = parser.parse_args()
    shape = {**SHAPES[arguments.shape], "model_type": "qwen3", "max_position_embeddings": arguments.longest}
    shape["num_hidden_layers"] = arguments.layers or shape["num_hidden_layers"]
    measure(shape, arguments)


def measure(shape: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Time the step, and a large matrix product on the same device for comparison."""
    batch = make_packed(shape["vocab_size"], arguments)
    options = {"compile": arguments.compile, "gradient_checkpointing": arguments.checkpointing}
    fields = {"model": {"config": shape}, "dtype": "bfloat16", "device": arguments.device, "options": options}
    step = engine_step(start_engine("fsdp", None, fields), batch, arguments.tokens)
    product, product_flops = matrix_product(arguments.device)
    sides: dict[str, Side] = {"training step": step, "matrix product": product}
    seconds = interleave(sides, repeats=arguments.repeats, warmup=3)
    flops = model_flops(shape, batch.lengths)
    speed = flops / statistics.median(seconds["training step"])
    peak = product_flops / statistics.median(seconds["matrix product"])
    size = f"{arguments.shape}, {shape['num_hidden_layers']} layers, {batch.num_tokens} tokens, bfloat16"
    lines = [f"{size}: {spread(seconds['training step'])} s a step, median and quartiles"]
    lines += [f"model FLOPs of a step: {flops:.4g}; {speed / 1e12:.4g} TFLOP/s"]
    lines += [f"of a large bfloat16 matrix product ({peak / 1e12:.4g} TFLOP/s): {speed / peak:.1%}"]
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else ""
    lines += [
        f"MFU, of the data sheet's {known / 1e12:.0f} TFLOP/s: {speed / known:.1%}"
        for device, known in PEAKS.items()
        if device in name
    ]
    sys.stdout.write("\n".join([*lines, ""]))


def make_packed(vocab_size: int, arguments: argparse.Namespace) -> SequenceBatch:
    """Sequences of skewed lengths that fill the micro-batches."""
    token_count = arguments.tokens * arguments.micro_batches
    lengths: list[int] = []
    for length in skewed_lengths(token_count, low=64, high=arguments.longest, mean=arguments.longest / 4):
        if sum(lengths) + length > token_count:
            break
        lengths.append(length)
    return make_batch(lengths, vocab_size)


def matrix_product(device: str) -> tuple[Callable[[], None], float]:
    """A product of square matrices that keeps ``device`` busy, and its FLOPs."""
    size, times = (8192, 20) if device == "cuda" else (1024, 2)
    left, right = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))

    def run() -> None:
        for _ in range(times):
            left @ right

    return run, 2.0 * size**3 * times


if __name__ == "__main__":
    main()
