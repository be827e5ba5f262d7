"""One training step of the ``fsdp`` engine against TRL's trainer and verl's engine, as real tokens a second.

    python benchmarks/peers.py

The same weights, sequences and optimizer on all sides; one process, one rank. A peer that is not installed is
left out; benchmarks/README.md says how to install them.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
from pathlib import Path

from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent))

from common.bare import bare_step, build
from common.engine import engine_step, fsdp_engine
from common.measure import Side, interleave, report
from common.processes import each_rank
from common.workload import MODEL, make_batch, skewed_lengths

from core_rl.distributed.process_group import RankAddress

COMPILED = {"compile": True, "reshard_after_forward": False, "reduce_scatter": "last"}
"""What a user turns on who has the memory, and some steps to wait for the compiler."""
INSTALL = {
    "trl": "pip install trl==1.16.0",
    "verl": "pip install --no-deps verl==0.9.1, with what benchmarks/README.md lists",
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--rows", type=int, default=8, help="sequences in one micro-batch of TRL")
    parser.add_argument("--budget", type=int, default=2048, help="tokens in one packed micro-batch")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-checkpointing", action="store_true",
                        help="turn off TRL's activation checkpointing, which it does by default")  # fmt: skip
    arguments = parser.parse_args()
    each_rank(measure, 1, arguments)


def measure(address: RankAddress, arguments: argparse.Namespace) -> None:
    """All sides in this process."""
    with tempfile.TemporaryDirectory() as path:
        build(MODEL, packed=False).save_pretrained(path)
        batch = make_batch(skewed_lengths(arguments.sequences))
        ids = list(batch.input_ids.split(batch.lengths))
        steps = {
            "fsdp engine": engine_step(fsdp_engine(address, path=path), batch, arguments.budget),
            "fsdp engine, compiled": engine_step(
                fsdp_engine(address, path=path, options=COMPILED), batch, arguments.budget
            ),
            "bare packed loop": bare_step(build(MODEL, packed=True, path=path), ids, budget=arguments.budget),
        }
        if installed("trl"):
            from common.trl_side import trl_step

            for name, padding_free in (("TRL, default", False), ("TRL, padding-free", True)):
                steps[name] = trl_step(
                    path,
                    ids,
                    rows=arguments.rows,
                    padding_free=padding_free,
                    checkpointing=False if arguments.no_checkpointing else None,
                )
        if installed("verl"):
            from common.verl_side import verl_step

            steps["verl, fsdp2"] = verl_step(path, ids, budget=arguments.budget)
        sides = {name: Side(step, batch.num_tokens) for name, step in steps.items()}
        seconds = interleave(sides, repeats=arguments.repeats)
    work = f"{len(ids)} sequences, {batch.num_tokens} real tokens, float32"
    report(f"{work}, {arguments.threads} threads", sides, seconds, base="fsdp engine")


def installed(peer: str) -> bool:
    """Whether ``peer`` can be imported; says how to install it if not."""
    found = importlib.util.find_spec(peer) is not None
    if not found:
        Console().print(f"{peer} is left out, since it is not installed: {INSTALL[peer]}")
    return found


if __name__ == "__main__":
    main()
