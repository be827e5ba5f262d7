"""One training step of the ``megatron`` engine against the ``fsdp`` engine, on one rank or several.

    python benchmarks/megatron_step.py
    python benchmarks/megatron_step.py --profile

Both train the same model on the same packed batch in one process. ``--profile`` lists what Megatron's step
spends its time on.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent))

from common.engine import engine_step, fsdp_engine, megatron_engine
from common.measure import Side, interleave, report
from common.processes import each_rank
from common.workload import make_batch, skewed_lengths

from core_rl.distributed.process_group import RankAddress


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--budget", type=int, default=2048, help="tokens in one packed micro-batch")
    parser.add_argument("--threads", type=int, help="of each rank; 2 in all by default")
    parser.add_argument(
        "--profile", action="store_true", help="list the operations of Megatron's step instead"
    )
    arguments = parser.parse_args()
    arguments.threads = arguments.threads or max(1, 2 // arguments.ranks)
    each_rank(measure, arguments.ranks, arguments)


def measure(address: RankAddress, arguments: argparse.Namespace) -> None:
    """Both sides on this rank."""
    ranks = arguments.ranks
    engines = {
        "fsdp engine": fsdp_engine(address, ranks=ranks),
        "megatron engine": megatron_engine(ranks=ranks),
    }
    whole = make_batch(skewed_lengths(arguments.sequences))
    batch = engines["fsdp engine"].shard_data(whole)
    steps = {name: engine_step(engine, batch, arguments.budget) for name, engine in engines.items()}
    if arguments.profile:
        profile(steps["megatron engine"])
    else:
        sides = {name: Side(step, whole.num_tokens) for name, step in steps.items()}
        seconds = interleave(sides, repeats=arguments.repeats)
        work = f"{arguments.sequences} sequences, {whole.num_tokens} tokens, packed to {arguments.budget}, float32"
        report(f"{ranks} rank{'s' * (ranks > 1)}, {work}", sides, seconds, base="fsdp engine")
    for engine in reversed(engines.values()):
        engine.destroy()


def profile(step: Callable[[], object]) -> None:
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
