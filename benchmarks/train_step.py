"""One training step of the ``fsdp`` engine against hand-written loops, on one rank or several.

    python benchmarks/train_step.py
    python benchmarks/train_step.py --ranks 2

The hand-written ``fully_shard`` loop packs in the same way; at one rank, the bare loop does without FSDP. At
several ranks the engine runs with other options too: gradients reduced once, weights kept gathered.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from common.bare import bare_step, build, shard_model
from common.engine import each_rank, engine_step, start_engine, step_options, work_of
from common.measure import Side, compare
from common.workload import MODEL, make_batch, skewed_lengths

from core_rl.distributed.process_group import RankAddress

OPTIONS = {
    "fsdp engine": {},
    "fsdp engine, reduce_scatter=last": {"reduce_scatter": "last"},
    "fsdp engine, reshard_after_forward=false": {"reshard_after_forward": False},
    "fsdp engine, both": {"reduce_scatter": "last", "reshard_after_forward": False},
}


def main() -> None:
    """Measure and print."""
    parser = step_options(__doc__)
    parser.add_argument("--ranks", type=int, default=1)
    arguments = parser.parse_args()
    each_rank(measure, arguments.ranks, arguments)


def measure(address: RankAddress, arguments: argparse.Namespace) -> None:
    """All sides on this rank."""
    ranks, budget = arguments.ranks, arguments.budget
    names = list(OPTIONS) if ranks > 1 else ["fsdp engine"]
    # The first engine joins the process group, and the others find it there.
    engines = {
        name: start_engine(
            "fsdp", None if number else address, {"layout": {"dp": ranks}, "options": OPTIONS[name]}
        )
        for number, name in enumerate(names)
    }
    whole = make_batch(skewed_lengths(arguments.sequences))
    batch = engines["fsdp engine"].shard_data(whole)
    ids = batch.input_ids.split(batch.lengths)
    sides: dict[str, Side] = {
        "hand-written": bare_step(shard_model(build(MODEL, packed=True)), ids, budget=budget)
    }
    sides |= {name: engine_step(engine, batch, budget) for name, engine in engines.items()}
    if ranks == 1:
        sides["bare, no FSDP"] = bare_step(build(MODEL, packed=True), ids, budget=budget)
    title = work_of(whole, arguments)
    compare(title, sides, whole.num_tokens, base="hand-written", repeats=arguments.repeats)
    for engine in reversed(engines.values()):
        engine.destroy()


if __name__ == "__main__":
    main()
