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
from common.engine import engine_step, fsdp_engine
from common.measure import Side, interleave, report
from common.processes import each_rank
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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--budget", type=int, default=2048, help="tokens in one packed micro-batch")
    parser.add_argument("--threads", type=int, help="of each rank; 2 in all by default")
    arguments = parser.parse_args()
    arguments.threads = arguments.threads or max(1, 2 // arguments.ranks)
    each_rank(measure, arguments.ranks, arguments)


def measure(address: RankAddress, arguments: argparse.Namespace) -> None:
    """All sides on this rank."""
    ranks, budget = arguments.ranks, arguments.budget
    names = list(OPTIONS) if ranks > 1 else ["fsdp engine"]
    # The first engine joins the process group, and the others find it there.
    engines = {
        name: fsdp_engine(None if number else address, ranks=ranks, options=OPTIONS[name])
        for number, name in enumerate(names)
    }
    whole = make_batch(skewed_lengths(arguments.sequences))
    batch = engines["fsdp engine"].shard_data(whole)
    ids = batch.input_ids.split(batch.lengths)
    sharded = bare_step(shard_model(build(MODEL, packed=True)), ids, budget=budget)
    sides = {"hand-written": Side(sharded, whole.num_tokens)}
    for name, engine in engines.items():
        sides[name] = Side(engine_step(engine, batch, budget), whole.num_tokens)
    if ranks == 1:
        bare = bare_step(build(MODEL, packed=True), ids, budget=budget)
        sides["bare, no FSDP"] = Side(bare, whole.num_tokens)
    seconds = interleave(sides, repeats=arguments.repeats)
    work = f"{arguments.sequences} sequences, {whole.num_tokens} tokens, packed to {budget}, float32"
    report(f"{ranks} rank{'s' * (ranks > 1)}, {work}", sides, seconds, base="hand-written")
    for engine in reversed(engines.values()):
        engine.destroy()


if __name__ == "__main__":
    main()
