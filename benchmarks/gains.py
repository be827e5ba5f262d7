"""Work that the ``fsdp`` engine leaves out, and the gain over the hand-written ``fully_shard`` loop.

    python benchmarks/gains.py

The loop computes the head at every token, as loops do that multiply by a mask afterwards. The engine computes it
where a token is trained, and no gradients for what is frozen; all sides have the same sequences.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from common.bare import bare_step, build, shard_model
from common.engine import each_rank, engine_step, start_engine, step_options, work_of
from common.measure import Side, compare
from common.workload import MODEL, make_batch, skewed_lengths, train_last

from core_rl.distributed.process_group import RankAddress

LOWER_HALF = [f"model.layers.{layer}.*" for layer in range(MODEL["num_hidden_layers"] // 2)]
SIDES: dict[str, tuple[float, dict[str, Any]]] = {
    "every token trained": (1.0, {}),
    "half of the tokens trained": (0.5, {}),
    "a tenth of the tokens trained": (0.1, {}),
    "embeddings and the lower half frozen": (1.0, {"frozen": ["model.embed_tokens.*", *LOWER_HALF]}),
    "LoRA of rank 8": (1.0, {"lora": {"rank": 8}}),
}
"""The part of each sequence that is trained, from its end, and fields of the model's config."""


def main() -> None:
    """Measure and print."""
    each_rank(measure, 1, step_options(__doc__).parse_args())


def measure(address: RankAddress, arguments: argparse.Namespace) -> None:
    """All sides in one process."""
    batch = make_batch(skewed_lengths(arguments.sequences))
    # The first engine joins the process group, and the others find it there.
    engines = {
        name: start_engine("fsdp", None if number else address, {"model": {"config": MODEL, **fields}})
        for number, (name, (_, fields)) in enumerate(SIDES.items())
    }
    ids = batch.input_ids.split(batch.lengths)
    sides: dict[str, Side] = {
        "hand-written": bare_step(shard_model(build(MODEL, packed=True)), ids, budget=arguments.budget)
    }
    for name, (part, _) in SIDES.items():
        sides[name] = engine_step(engines[name], train_last(batch, part), arguments.budget)
    title = work_of(batch, arguments)
    compare(title, sides, batch.num_tokens, base="hand-written", repeats=arguments.repeats)
    for engine in reversed(engines.values()):
        engine.destroy()


if __name__ == "__main__":
    main()
