"""Steps of GRPO with shared prompts computed once, against the same engine that packs whole sequences.

    python benchmarks/shared_prefix.py --prompts 1 --repeats 4 --threads 1
    python benchmarks/shared_prefix.py 4:1 --group 8 --prompts 24 --ranks 2 4 8

For each ratio of prompt to completion and each group size: log-probs of all tokens, and an update over the completions,
with whole sequences packed, with shared prefixes, and by a hand-written loop that packs whole sequences. "Aim" is the
part of the tokens that is computed. Attention to the prompt, and the head at completions, are the same work either way.
``--ranks`` measures nothing: it counts the tokens that data-parallel ranks compute, where sequences are spread by their
tokens alone, and by what they share; completions have half to one and a half of the length.
"""

from __future__ import annotations

import argparse
from functools import partial
from itertools import product

import torch
from common.bare import bare_step, build, pack
from common.engine import each_rank, start_engine
from common.measure import Side, compare, figures_table, show
from common.options import read, step_options
from common.workload import MODEL, token_nll

from core_rl import LossSpec, MicroBatchSpec
from core_rl.data.batch import SequenceBatch
from core_rl.data.micro_batch import shard_plan
from core_rl.data.prefixes import PrefixTree
from core_rl.distributed.process_group import RankAddress

LENGTHS = {"4:1": (512, 128), "1:1": (256, 256), "1:4": (128, 512)}
"""Tokens of a prompt and of a completion."""
TINY = {"repeats": 1, "group": [2], "prompts": 1, "threads": 1}


def main() -> None:
    """Measure and print."""
    parser = step_options(__doc__)
    parser.add_argument("ratios", nargs="*", metavar="RATIO", default=list(LENGTHS))
    parser.add_argument("--group", type=int, nargs="*", default=[8, 16], help="completions of a prompt")
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument(
        "--ranks", type=int, nargs="*", help="count the tokens of so many data-parallel ranks"
    )
    parser.set_defaults(repeats=5, budget=8192)
    arguments = read(parser, TINY)
    if arguments.ranks:
        spread_over_ranks(arguments)
    else:
        each_rank(measure, 1, arguments)


def spread_over_ranks(arguments: argparse.Namespace) -> None:
    """A table of computed tokens."""
    columns = ("lengths", "G", "ranks", "spread by", "slowest rank", "all ranks", "part of all tokens")
    table = figures_table(columns, title=f"computed tokens, {arguments.prompts} prompts")
    for ratio, group in product(arguments.ratios, arguments.group):
        batch = rollouts(*LENGTHS[ratio], group, arguments.prompts, ragged=True)
        order = batch.prefix_order
        for ranks, shares in product(arguments.ranks, (False, True)):
            computed = [order.computed(part) for part in shard_plan(batch, ranks, shares)]
            figures = f"{max(computed):,}", f"{sum(computed):,}", f"{sum(computed) / batch.num_tokens:.3f}"
            table.add_row(ratio, str(group), str(ranks), "shared prefixes" if shares else "tokens", *figures)
    show(table)


def measure(address: RankAddress, arguments: argparse.Namespace) -> None:
    """All shapes, on one engine."""
    engine = start_engine("fsdp", address)
    loss = LossSpec(fn=token_nll)
    for ratio in arguments.ratios:
        for group in arguments.group:
            batch = rollouts(*LENGTHS[ratio], group, arguments.prompts)
            tree = PrefixTree.of(batch)
            assert tree is not None
            title = f"{ratio}, G = {group}, {batch.num_tokens} tokens, aim {len(tree.kept) / batch.num_tokens:.2f}"
            ways = {
                way: MicroBatchSpec(max_tokens=arguments.budget, share_prefixes=way == "shared")
                for way in ("packed", "shared")
            }
            passes: dict[str, Side] = {way: partial(engine.forward, batch, cut) for way, cut in ways.items()}
            updates: dict[str, Side] = {
                way: partial(engine.train_batch, batch, loss, cut) for way, cut in ways.items()
            }
            ids = batch.input_ids.split(batch.lengths)
            cut = partial(pack, budget=arguments.budget)
            updates["hand-written"] = bare_step(build(MODEL, packed=True), ids, cut)
            for part, sides in {"log-probs": passes, "update": updates}.items():
                name = f"{part} at {title}"
                compare(name, sides, batch.num_tokens, base="packed", repeats=arguments.repeats, warmup=1)
    engine.destroy()


def rollouts(prompt: int, completion: int, group: int, prompts: int, ragged: bool = False) -> SequenceBatch:
    """``group`` random completions of each of ``prompts`` prompts; completions are trained.

    ``ragged`` completions have from half to one and a half of the length.
    """
    random = torch.Generator().manual_seed(0)

    def draw(length: int) -> torch.Tensor:
        return torch.randint(0, MODEL["vocab_size"], (length,), generator=random)

    def length() -> int:
        return (
            completion // 2 + int(torch.randint(completion, (), generator=random)) if ragged else completion
        )

    rows = [
        torch.cat([shared, draw(length())])
        for shared in (draw(prompt) for _ in range(prompts))
        for _ in range(group)
    ]
    return SequenceBatch.from_sequences(
        rows, tokens={"loss_mask": [torch.arange(len(row)) >= prompt for row in rows]}
    )


if __name__ == "__main__":
    main()
