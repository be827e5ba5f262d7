"""One training step of the ``megatron`` engine against the ``fsdp`` engine, on one rank or several.

    python benchmarks/megatron_step.py
    python benchmarks/megatron_step.py --profile

Both train the same model on the same packed batch in one process. ``--profile`` lists what Megatron's step
spends its time on.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent))

from common.engine import each_rank, engine_step, start_engine, step_options, work_of
from common.measure import Side, compare
from common.workload import make_batch, skewed_lengths

from core_rl.distributed.process_group import RankAddress


def main() -> None:
    """Measure and print."""
    parser = step_options(__doc__)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument(
        "--profile", action="store_true", help="list the operations of Megatron's step instead"
    )
    arguments = parser.parse_args()
    each_rank(measure, arguments.ranks, arguments)


def measure(address: RankAddress, arguments: argparse.Namespace) -> None:
    """Both sides on this rank."""
    layout = {"layout": {"dp": arguments.ranks}}
    engines = [start_engine("fsdp", address, layout), start_engine("megatron", None, layout)]
    whole = make_batch(skewed_lengths(arguments.sequences))
    batch = engines[0].shard_data(whole)
    sides: dict[str, Side] = {
        f"{engine.spec.name} engine": engine_step(engine, batch, arguments.budget) for engine in engines
    }
    if arguments.profile:
        profile(sides["megatron engine"])
    else:
        title = work_of(whole, arguments)
        compare(title, sides, whole.num_tokens, base="fsdp engine", repeats=arguments.repeats)
    for engine in reversed(engines):
        engine.destroy()


def profile(step: Side) -> None:
    """Print where three steps spend their time."""
    step()
    with torch.profiler.profile() as recorded:
        for _ in range(3):
            step()
    Console().print(
        recorded.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=60)
    )


if __name__ == "__main__":
    main()
