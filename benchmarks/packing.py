"""Costs of packing many short sequences, each with the same work by hand.

    python benchmarks/packing.py attention

``attention``: forward and backward of packed attention, with SDPA on each piece of one ``split``. The heads are
those of Qwen2.5-0.5B (14 x 64).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

from common.bare import segment_attention
from common.measure import compare

from core_rl.toolkit.attention import Segments, packed_attention

HEADS, WIDTH = 14, 64


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("comparisons", nargs="*", metavar="COMPARISON", help=f"of {', '.join(COMPARISONS)}")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=8192)
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


COMPARISONS: dict[str, Callable[[argparse.Namespace], None]] = {"attention": attention}


if __name__ == "__main__":
    main()
