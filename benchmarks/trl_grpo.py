"""Log-probs and updates of a GRPO step with the ``fsdp`` engine, and with TRL's ``GRPOTrainer``.

    python benchmarks/trl_grpo.py
    python benchmarks/trl_grpo.py --model-dir runs/smollm2/start/model --prompts 8 --repeats 5

The same weights, prompts and completions on both sides. The completions are given (TRL gets them from a
``rollout_func``), so that neither side pays for drawing them: the clock runs for the log-probs before the updates
and for the updates alone. Core-rl's side includes advantages and the way to the engine's process. TRL's side leaves
out rewards, decoding and metrics of its rollouts. see docs/benchmarks.md to install TRL.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from common.bare import model_directory
from common.measure import figures_table, rounds, show, spread
from common.options import installed, model_dir_option, options, read
from common.rollouts import GRPOPhases, Rollout, given_rollout, packed_rollout

from core_rl import EngineGroup, MicroBatchSpec
from core_rl_trainer.algorithms import ModelInterfaceAbstraction, make_interface
from core_rl_trainer.algorithms.fields import BEHAVIOUR, PROXIMAL

PHASES = ("logprobs", "update")
OURS = "fsdp engine"
TINY = {"repeats": 1, "prompts": 4, "group": 2, "rows": 2, "threads": 1, "model_dir": None}


def main() -> None:
    """Measure and print."""
    parser = options(__doc__)
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group", type=int, default=4, help="completions to each prompt")
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--minibatches", type=int, default=2, help="updates of one step")
    parser.add_argument("--rows", type=int, default=8, help="sequences in one micro-batch of TRL")
    parser.add_argument("--budget", type=int, default=2048, help="tokens in one packed micro-batch")
    parser.add_argument("--threads", type=int, default=2)
    model_dir_option(parser)
    arguments = read(parser, TINY)
    if installed("trl"):
        measure(arguments)


def measure(arguments: argparse.Namespace) -> None:
    """All sides in this process and in the engine's."""
    from common.trl_grpo_side import trl_grpo

    torch.set_num_threads(arguments.threads)
    rollout = given_rollout(arguments.prompts, arguments.group, arguments.prompt_tokens)
    with model_directory(arguments.model_dir) as path:
        fields: dict[str, Any] = {"model": {"path": path}, "optimizer": {"lr": 1e-6}, "device": "cpu"}
        # One rank in a process of its own, as ``core-rl train`` starts it.
        with EngineGroup("fsdp", threads_per_rank=arguments.threads, **fields) as group:
            sides = {
                OURS: core_rl_step(group, rollout, arguments.minibatches, arguments.budget),
                "TRL, default": trl_grpo(path, rollout, rows=arguments.rows, minibatches=arguments.minibatches,
                                         checkpointing=True),
                "TRL, no checkpointing": trl_grpo(path, rollout, rows=arguments.rows,
                                                  minibatches=arguments.minibatches, checkpointing=False),
            }  # fmt: skip
            seconds = rounds(sides, repeats=arguments.repeats, warmup=1)
    report(rollout, seconds, arguments.threads)


def core_rl_step(
    group: EngineGroup, rollout: Rollout, minibatches: int, budget: int
) -> Callable[[], GRPOPhases]:
    """Log-probs of the weights before the updates, and the updates, as the training loop makes them."""
    actor = make_interface(ModelInterfaceAbstraction("grpo", {"minibatches": minibatches}))
    batch, micro_batches = packed_rollout(rollout), MicroBatchSpec(max_tokens=budget)

    def step() -> GRPOPhases:
        start = time.perf_counter()
        proximal = actor.inference(group, batch, micro_batches)[BEHAVIOUR]
        between = time.perf_counter()
        actor.train_step(group, batch.with_tokens(**{PROXIMAL: proximal}), micro_batches)
        group.lr_scheduler_step()
        return {"logprobs": between - start, "update": time.perf_counter() - between}

    return step


def report(rollout: Rollout, seconds: Mapping[str, list[GRPOPhases]], threads: int) -> None:
    """A table of the phases, and of the ratio of their sum to ours in the same round."""
    title = (
        f"{len(rollout.completions)} completions, {rollout.tokens} real tokens, float32, {threads} threads"
    )
    caption = f"median (quartiles) of {len(seconds[OURS])} rounds; torch {torch.__version__}"
    columns = ("", "log-probs, s", "updates, s", "both, s", f"both / {OURS}")
    table = figures_table(columns, title=title, caption=caption)
    totals = {
        name: [sum(phases[p] for p in PHASES) for phases in timings] for name, timings in seconds.items()
    }
    for name, timings in seconds.items():
        ratios = [time_s / base_s for time_s, base_s in zip(totals[name], totals[OURS], strict=True)]
        parts = [spread([phases[phase] for phases in timings]) for phase in PHASES]
        table.add_row(name, *parts, spread(totals[name]), spread(ratios))
    show(table)


if __name__ == "__main__":
    main()
