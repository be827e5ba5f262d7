"""One training step of the engines against hand-written loops, and against each other.

    python benchmarks/train_step.py loops
    python benchmarks/train_step.py options --ranks 2
    python benchmarks/train_step.py loops --width 64 --sequences 256 --budget 352
    python benchmarks/train_step.py megatron --profile

``loops``: a hand-written ``fully_shard`` loop that packs in the same way, and a loop without FSDP. With ``--width`` on
a model of two layers, where calls cost more than tokens, and on sequences of 11 tokens, which the loops pad.
``options``: gradients reduced once and weights kept gathered, for several ranks. ``gains``: work that the engine leaves
out. The loop computes the head at every token. The engine computes it where a token is trained, and no gradients for
frozen parts. ``padded``: padded against packed training on rollouts of skewed lengths. ``megatron``: the two engines.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from common.bare import bare_step, build, pack, pad, shard_model
from common.engine import each_rank, engine_step, start_engine, work_of
from common.measure import Side, compare
from common.options import read, step_options
from common.workload import MODEL, make_batch, model_of, skewed_lengths, train_last
from rich.console import Console

from core_rl.data.batch import SequenceBatch
from core_rl.distributed.process_group import RankAddress

TINY = {"repeats": 1, "sequences": 4, "rows": 2, "threads": 1}


@dataclass(frozen=True)
class Variant:
    """An engine with fields of its config, and the part of each sequence that is trained, from its end."""

    engine: str = "fsdp"
    fields: Mapping[str, Any] = field(default_factory=dict)
    trained: float = 1.0


def _options(**options: Any) -> Variant:
    return Variant(fields={"options": options})


def _model(**fields: Any) -> Variant:
    return Variant(fields={"model": {"config": MODEL, **fields}})


LOWER_HALF = [f"model.layers.{layer}.*" for layer in range(MODEL["num_hidden_layers"] // 2)]
COMPARISONS: dict[str, dict[str, Variant]] = {
    "loops": {"fsdp engine": Variant()},
    "options": {
        "fsdp engine": Variant(),
        "fsdp engine, reduce_scatter=last": _options(reduce_scatter="last"),
        "fsdp engine, reshard_after_forward=false": _options(reshard_after_forward=False),
        "fsdp engine, both": _options(reduce_scatter="last", reshard_after_forward=False),
    },
    "gains": {
        "every token trained": Variant(),
        "half of the tokens trained": Variant(trained=0.5),
        "a tenth of the tokens trained": Variant(trained=0.1),
        "embeddings and the lower half frozen": _model(frozen=["model.embed_tokens.*", *LOWER_HALF]),
        "LoRA of rank 8": _model(lora={"rank": 8}),
    },
    "padded": {"fsdp engine, packed": Variant()},
    "megatron": {"fsdp engine": Variant(), "megatron engine": Variant("megatron")},
}
"""The engines of each comparison; the sides of `by_hand` come first, and the first side of all is the base."""


def main() -> None:
    """Measure and print."""
    parser = step_options(__doc__)
    parser.add_argument("comparisons", nargs="*", metavar="COMPARISON", help=f"of {', '.join(COMPARISONS)}")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rows", type=int, default=8, help="sequences in one padded micro-batch")
    parser.add_argument(
        "--width", type=int, help="of a small model of two layers, for sequences of 11 tokens"
    )
    parser.add_argument("--profile", action="store_true", help="list the operations of the last side instead")
    arguments = read(parser, TINY)
    for name in arguments.comparisons or [name for name in COMPARISONS if name != "options"]:
        arguments.comparison = name
        each_rank(measure, arguments.ranks, arguments)


def measure(address: RankAddress, arguments: argparse.Namespace) -> None:
    """All sides of ``arguments.comparison`` on this rank."""
    lengths = skewed_lengths(arguments.sequences) if arguments.width is None else [11] * arguments.sequences
    model = model_of(arguments.width)
    full_batch = make_batch(lengths, model["vocab_size"])
    variants = COMPARISONS[arguments.comparison]
    fields = {"layout": {"dp": arguments.ranks}, "model": {"config": model}}
    # The first engine joins the process group, and the others find it there.
    engines = {
        name: start_engine(variant.engine, None if number else address, {**fields, **variant.fields})
        for number, (name, variant) in enumerate(variants.items())
    }
    batch = next(iter(engines.values())).shard_data(full_batch)
    sides = by_hand(arguments, batch)
    for name, variant in variants.items():
        sides[name] = engine_step(engines[name], train_last(batch, variant.trained), arguments.budget)
    base, *_, last = sides
    if arguments.profile:
        profile(sides[last])
    else:
        title = work_of(full_batch, arguments.budget, arguments.ranks)
        compare(title, sides, full_batch.num_tokens, base=base, repeats=arguments.repeats)
    for engine in reversed(engines.values()):
        engine.destroy()


def by_hand(arguments: argparse.Namespace, batch: SequenceBatch) -> dict[str, Side]:
    """The hand-written sides of ``arguments.comparison``."""
    ids, rows = batch.input_ids.split(batch.lengths), arguments.rows
    cut = partial(pack, budget=arguments.budget)
    if arguments.comparison == "megatron":
        return {}
    if arguments.comparison == "padded":
        cut = partial(pad, rows=rows)
        size = sum(tokens.numel() for tokens, *_ in cut(ids))
        return {f"padded by {rows} to {size} tokens": bare_step(build(MODEL, packed=False), ids, cut)}
    model, packed = model_of(arguments.width), arguments.width is None
    if not packed:  # equal lengths, of which a padded loop wastes nothing
        cut = partial(pad, rows=arguments.budget // len(ids[0]))
    sides: dict[str, Side] = {"hand-written": bare_step(shard_model(build(model, packed=packed)), ids, cut)}
    if arguments.comparison == "loops" and arguments.ranks == 1:
        sides["bare, no FSDP"] = bare_step(build(model, packed=packed), ids, cut)
    return sides


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
