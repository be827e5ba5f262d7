"""Costs of packing many sequences, each next to its ideal cost.

    python benchmarks/packing.py [attention] [batches]

``attention``: forward and backward of packed attention, with SDPA on each piece of one ``split``. The heads
have the shape of Qwen2.5-0.5B (14 x 64). ``batches``: sharding and cutting a batch of 30,000 sequences, and the way
back, with ten batches of the same sequences.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

from common.bare import segment_attention
from common.measure import compare
from common.workload import make_batch, skewed_lengths

from core_rl.backend.steps import MicroBatches
from core_rl.data.batch import SequenceBatch
from core_rl.data.micro_batch import (
    MicroBatchSpec,
    count_micro_batches,
    plan_micro_batches,
    shard,
    unshard_output,
    unshard_rows,
)
from core_rl.data.outputs import ModelOutput
from core_rl.toolkit.attention import packed_attention
from core_rl.toolkit.segments import Segments

HEADS, WIDTH = 14, 64


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("comparisons", nargs="*", metavar="COMPARISON", help=f"of {', '.join(COMPARISONS)}")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=8192, help="of attention")
    parser.add_argument("--sequences", type=int, default=30_000, help="of a batch")
    parser.add_argument("--budget", type=int, default=2048, help="tokens in one packed micro-batch")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for name in arguments.comparisons or COMPARISONS:
        COMPARISONS[name](arguments)


def attention(arguments: argparse.Namespace) -> None:
    """Compare attention over segments of 8 and of 64 tokens."""
    for length in (8, 64):
        bounds = list(range(0, arguments.tokens + 1, length))
        sides = {
            "one split": partial(segment_attention, bounds=bounds, scaling=None),
            "core-rl": partial(packed_attention, segments=Segments(tuple(bounds))),
        }
        compare(
            f"attention over {len(bounds) - 1} segments of {length} tokens, forward and backward",
            {name: partial(forward_backward, side, bounds[-1]) for name, side in sides.items()},
            bounds[-1],
            base="one split",
            repeats=arguments.repeats,
        )


def forward_backward(function: Callable[..., tuple[Tensor, None]], tokens: int) -> None:
    """One pass of an attention function over random states."""
    shape = (1, HEADS, tokens, WIDTH)
    query, key, value = (torch.ones(shape, requires_grad=True) for _ in range(3))
    out, _ = function(nn.Module(), query, key, value, None)
    out.backward(torch.ones_like(out))


def batches(arguments: argparse.Namespace) -> None:
    """Compare one batch with ten batches of the same sequences."""
    lengths = skewed_lengths(arguments.sequences)
    tenth = len(lengths) // 10
    parts = [make_batch(lengths[start : start + tenth]) for start in range(0, len(lengths), tenth)]
    base = f"{len(parts)} of {tenth} sequences"
    sides = {base: parts, f"1 of {len(lengths)} sequences": [make_batch(lengths)]}
    compare(
        f"batches for 8 ranks, cut to {arguments.budget} tokens and put in order again",
        {name: partial(there_and_back, side, arguments.budget) for name, side in sides.items()},
        sum(lengths),
        base=base,
        repeats=arguments.repeats,
    )


def there_and_back(batches: Sequence[SequenceBatch], budget: int) -> None:
    """Run the core's work on batches around the model: outputs for each token, and a row for each sequence."""
    spec = MicroBatchSpec(max_tokens=budget)
    for part in (part for batch in batches for part in shard(batch, 8)):
        plan = plan_micro_batches(part, spec, count_micro_batches(part, spec))
        micro_batches = MicroBatches(part, plan, part.device)
        outputs = [ModelOutput(logprobs=item.input_ids.float()) for item in micro_batches.items]
        unshard_output(outputs, part, plan)
        unshard_rows([item.input_ids.split(item.lengths) for item in micro_batches.items], plan)


COMPARISONS: dict[str, Callable[[argparse.Namespace], None]] = {"attention": attention, "batches": batches}


if __name__ == "__main__":
    main()
