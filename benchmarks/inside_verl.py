"""verl's actor update on the ``fsdp`` engine against verl's own FSDP engine, as real tokens a second.

    python benchmarks/inside_verl.py

The same weights, rollouts, loss and micro-batch budget on both sides, by verl's `TrainingWorker.train_mini_batch`; one
process, one rank. Needs verl and ``core-rl-verl``; see docs/benchmarks.md.
"""

from __future__ import annotations

import sys
import tempfile
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from common.bare import build
from common.engine import step_options, work_of
from common.measure import Side, compare
from common.workload import MODEL, make_batch, skewed_lengths
from torch import Tensor


def main() -> None:
    """Measure and print."""
    arguments = step_options(__doc__).parse_args()
    # Of environments with verl alone, and `--help` works in all.
    from common.verl_side import with_bounds
    from core_rl_verl.actor_steps import OURS, THEIRS, Rollout, actor, step

    torch.set_num_threads(arguments.threads or 2)
    batch = make_batch(skewed_lengths(arguments.sequences))
    rollouts = [Rollout(*_rollout(ids)) for ids in batch.input_ids.split(batch.lengths)]
    with tempfile.TemporaryDirectory() as path:
        build(MODEL, packed=False).save_pretrained(path)
        sides: dict[str, Side] = {}
        for name, strategy in (("core-rl, fsdp", OURS), ("verl, fsdp2", THEIRS)):
            worker = actor(path, strategy, attention="bare_segments", max_token_len_per_gpu=arguments.budget)
            if strategy == THEIRS:
                worker.engine.module.register_forward_pre_hook(with_bounds, with_kwargs=True)
            sides[name] = partial(step, worker, rollouts)
        title = f"verl's actor update: {work_of(batch, arguments)}"
        compare(title, sides, batch.num_tokens, base="verl, fsdp2", repeats=arguments.repeats)


def _rollout(ids: Tensor) -> tuple[Tensor, Tensor, Tensor, float]:
    """Prompt, a third of the tokens, and response, its log-probs of a uniform policy, and the advantage."""
    begin = max(1, len(ids) // 3)
    uniform = -torch.tensor(float(MODEL["vocab_size"])).log()
    return ids[:begin], ids[begin:], uniform.expand(len(ids) - begin).contiguous(), 1.0


if __name__ == "__main__":
    main()
