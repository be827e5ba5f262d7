"""Truncated importance sampling on and off, by re-scoring the same completions of a real server.

    python examples/smollm2/rescore.py bfloat16     # after prepare.py, with CORE_RL_SGLANG_PYTHON

A line of JSON for each number of updates since the completions: their importance weights, and how far the gradient with
the weights is from the one without.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from core_rl import EngineGroup, MicroBatchSpec, SamplingParams, SequenceBatch, load_config, load_engine
from core_rl.distributed.comm import Comm
from core_rl_trainer.algorithms import ModelInterfaceAbstraction, make_interface
from core_rl_trainer.algorithms.fields import BEHAVIOUR, PROXIMAL
from core_rl_trainer.algorithms.off_policy import importance_metrics
from core_rl_trainer.rewards.text import integer_match
from core_rl_trainer.workflows.episodes import SingleTurnWorkflow

START = Path("runs/smollm2/start")
LAGS = (0, 1, 2, 4)
CUT = MicroBatchSpec(max_tokens=2048)


def completions(dtype: str) -> SequenceBatch:
    """Four answers to each of 16 products."""
    model = {"path": str(START / "model")}
    tokenizer: Any = AutoTokenizer.from_pretrained(model["path"])
    lines = (START / "products.jsonl").read_text(encoding="utf-8").splitlines()[:16]
    rows = [json.loads(line) for line in lines]
    for row in rows:
        row["prompt_ids"] = tokenizer.apply_chat_template(
            row["prompt"], add_generation_prompt=True, return_dict=False
        )

    def reward(prompt_ids: Sequence[int], output_ids: Sequence[int], row: Any) -> float:  # noqa: ARG001
        return integer_match(tokenizer.decode(output_ids, skip_special_tokens=True), row)

    options = {"max_running_requests": 32, "max_total_tokens": 8192}
    values: dict[str, Any] = {"model": model, "dtype": dtype, "options": options}
    engine: Any = load_engine("sglang", load_config("sglang")(**values))
    engine.initialize()
    sampling = SamplingParams(seed=0, max_new_tokens=24)
    batch: SequenceBatch = engine.rollout(
        rows, SingleTurnWorkflow(reward=reward, sampling=sampling, group_size=4)
    )
    engine.destroy()
    return batch


def main() -> None:
    """Print the lines."""
    dtype = sys.argv[1]
    batch = completions(dtype)
    corrections: list[dict[str, Any]] = [{}, {"correction": "token_truncated"}]
    actors: list[Any] = [make_interface(ModelInterfaceAbstraction("grpo", args)) for args in corrections]
    off, on = actors
    fields: dict[str, Any] = {
        "model": {"path": str(START / "model")},
        "optimizer": {"lr": 2e-5},
        "dtype": dtype,
    }
    with EngineGroup("fsdp", threads_per_rank=2, device="cpu", **fields) as group:
        for updates in range(max(LAGS) + 1):
            scored = batch.with_tokens(**{PROXIMAL: off.inference(group, batch, CUT)[BEHAVIOUR]})
            if updates in LAGS:
                gradients = []
                for actor in actors:
                    prepared = actor.prepare(scored)
                    group.forward_backward(prepared, actor.loss().spec(1.0), CUT)
                    grads = group.named_tensors("grads").values()
                    gradients.append(torch.cat([grad.double().flatten() for grad in grads]))
                    group.optimizer_zero_grad()
                apart = (gradients[1] - gradients[0]).norm() / gradients[0].norm()
                weights = importance_metrics(on.config.correction, prepared, Comm())
                print(json.dumps({"updates": updates, "gradients_apart": float(apart), **weights}))  # noqa: T201
            off.train_step(group, scored, CUT)
            group.lr_scheduler_step()


if __name__ == "__main__":
    main()
