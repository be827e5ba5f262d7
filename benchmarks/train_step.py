"""One training step of the ``fsdp`` engine on one rank against hand-written loops.

    python benchmarks/train_step.py

The hand-written ``fully_shard`` loop packs in the same way; the bare loop does without FSDP.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from common.bare import bare_step, build, shard_model
from common.measure import Side, interleave, report
from common.workload import MODEL, make_batch, skewed_lengths, token_nll

from core_rl import LossSpec, MicroBatchSpec, ModelConfig, OptimizerConfig, get_spec, load_config, load_engine


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    batch = make_batch(skewed_lengths(arguments.sequences))
    ids = batch.input_ids.split(batch.lengths)

    spec = get_spec("fsdp")
    config = load_config(spec)(
        model=ModelConfig(config=MODEL), optimizer=OptimizerConfig(lr=1e-4, weight_decay=0.01)
    )
    engine = load_engine(spec)(spec, config)
    engine.initialize()
    loss, budget = LossSpec(fn=token_nll), MicroBatchSpec(max_tokens=arguments.budget)
    sharded = bare_step(shard_model(build(MODEL, packed=True)), ids, budget=arguments.budget)
    bare = bare_step(build(MODEL, packed=True), ids, budget=arguments.budget)
    sides = {
        "hand-written": Side(sharded, batch.num_tokens),
        "fsdp engine": Side(lambda: engine.train_batch(batch, loss, budget), batch.num_tokens),
        "bare, no FSDP": Side(bare, batch.num_tokens),
    }
    seconds = interleave(sides, repeats=arguments.repeats)
    title = (
        f"one rank, {len(ids)} sequences, {batch.num_tokens} tokens, packed to {arguments.budget}, float32"
    )
    report(title, sides, seconds, base="hand-written")
    engine.destroy()


if __name__ == "__main__":
    main()
