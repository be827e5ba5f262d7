"""Packed against padded training on rollouts of skewed lengths.

    python benchmarks/packed_padded.py

Log-normal lengths of 16 to 512 tokens with a mean near 120; real tokens a second of both.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from common.bare import build, padded_step
from common.engine import each_rank, engine_step, start_engine, step_options, work_of
from common.measure import Side, compare
from common.workload import MODEL, make_batch, skewed_lengths

from core_rl.distributed.process_group import RankAddress


def main() -> None:
    """Measure and print."""
    parser = step_options(__doc__)
    parser.add_argument("--rows", type=int, default=8, help="sequences in one padded micro-batch")
    each_rank(measure, 1, parser.parse_args())


def measure(address: RankAddress, arguments: argparse.Namespace) -> None:
    """Both sides in one process."""
    batch = make_batch(skewed_lengths(arguments.sequences))
    ids, rows = batch.input_ids.split(batch.lengths), arguments.rows
    engine = start_engine("fsdp", address)
    sides: dict[str, Side] = {
        "padded": padded_step(build(MODEL, packed=False), ids, rows=rows),
        "fsdp engine, packed": engine_step(engine, batch, arguments.budget),
    }
    parts = [batch.lengths[start : start + rows] for start in range(0, len(ids), rows)]
    padded = sum(max(lengths) * len(lengths) for lengths in parts)
    title = f"{work_of(batch, arguments)}; {padded} tokens when padded by {rows}"
    compare(title, sides, batch.num_tokens, base="padded", repeats=arguments.repeats)
    engine.destroy()


if __name__ == "__main__":
    main()
