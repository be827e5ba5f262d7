"""Packed against padded training on rollouts of skewed lengths.

    python benchmarks/packed_padded.py

Log-normal lengths of 16 to 512 tokens with a mean near 120; real tokens a second of both.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from common.bare import build, padded_step
from common.engine import engine_step, fsdp_engine
from common.measure import Side, interleave, report
from common.workload import MODEL, make_batch, skewed_lengths


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--rows", type=int, default=8, help="sequences in one padded micro-batch")
    parser.add_argument("--budget", type=int, default=2048, help="tokens in one packed micro-batch")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    batch = make_batch(skewed_lengths(arguments.sequences))
    ids = batch.input_ids.split(batch.lengths)

    engine = fsdp_engine()
    padded = padded_step(build(MODEL, packed=False), ids, rows=arguments.rows)
    sides = {
        "padded": Side(padded, batch.num_tokens),
        "fsdp engine, packed": Side(engine_step(engine, batch, arguments.budget), batch.num_tokens),
    }
    seconds = interleave(sides, repeats=arguments.repeats)
    slots = sum(max(map(len, ids[i : i + arguments.rows])) * len(ids[i : i + arguments.rows])
                for i in range(0, len(ids), arguments.rows))  # fmt: skip
    title = f"{len(ids)} sequences, {batch.num_tokens} real tokens, {slots} when padded by {arguments.rows}, float32"
    report(title, sides, seconds, base="padded")
    engine.destroy()


if __name__ == "__main__":
    main()
