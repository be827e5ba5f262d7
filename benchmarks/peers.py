"""One training step of the ``fsdp`` engine against TRL's trainer and verl's engine, as real tokens a second.

    python benchmarks/peers.py
    python benchmarks/peers.py --model-dir runs/smollm2/start/model --sequences 16 --repeats 5

The same weights, sequences and optimizer on all sides; one process, one rank. A peer that is not installed is
left out; see docs/benchmarks.md to install them.
"""

from __future__ import annotations

import argparse
from functools import partial

from common.bare import bare_step, build, model_directory, pack
from common.engine import each_rank, engine_step, start_engine, work_of
from common.measure import Side, compare
from common.options import installed, model_dir_option, read, step_options
from common.workload import MODEL, make_batch, skewed_lengths

from core_rl.distributed.process_group import RankAddress

COMPILED = {"compile": True, "reshard_after_forward": False, "reduce_scatter": "last"}
"""Options for users with enough memory, and time for the compiler."""
TINY = {"repeats": 1, "sequences": 4, "rows": 2, "threads": 1, "model_dir": None}


def main() -> None:
    """Measure and print."""
    parser = step_options(__doc__)
    parser.add_argument("--rows", type=int, default=8, help="sequences in one micro-batch of TRL")
    model_dir_option(parser)
    parser.add_argument("--no-checkpointing", action="store_true",
                        help="turn off TRL's activation checkpointing, which it does by default")  # fmt: skip
    each_rank(measure, 1, read(parser, TINY))


def measure(address: RankAddress, arguments: argparse.Namespace) -> None:
    """All sides in this process."""
    with model_directory(arguments.model_dir) as path:
        batch = make_batch(skewed_lengths(arguments.sequences))
        ids = list(batch.input_ids.split(batch.lengths))
        fields, cut = {"model": {"path": path}}, partial(pack, budget=arguments.budget)
        compiled = start_engine("fsdp", address, {**fields, "options": COMPILED})
        steps: dict[str, Side] = {
            "fsdp engine": engine_step(start_engine("fsdp", None, fields), batch, arguments.budget),
            "fsdp engine, compiled": engine_step(compiled, batch, arguments.budget),
            "bare packed loop": bare_step(build(MODEL, packed=True, path=path), ids, cut),
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
        title = work_of(batch, arguments.budget, 1)
        compare(title, steps, batch.num_tokens, base="fsdp engine", repeats=arguments.repeats)


if __name__ == "__main__":
    main()
