"""TRL's GRPOTrainer on given completions, one generation batch at a time, with the seconds of its phases."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import datasets
import torch
from trl import GRPOConfig, GRPOTrainer

from common.bare import build
from common.rollouts import LOGPROB, GRPOPhases, Rollout, reward_of, word_tokenizer
from common.trl_side import UNLOGGED, StepGate
from common.workload import MODEL


def trl_grpo(
    path: str, rollout: Rollout, *, rows: int, minibatches: int, checkpointing: bool
) -> Callable[[], GRPOPhases]:
    """A function that lets the trainer take the same completions once more: log-probs, and ``minibatches`` updates.

    Everything is the trainer's default but what makes the work the same: float32, a constant learning rate,
    micro-batches of ``rows``, GRPO's loss, and no logging or saving. With several updates on one rollout the trainer
    computes the log-probs before the first of them, as GRPO's ratios need.
    """
    updates = len(rollout.completions) // (rows * minibatches)
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(prefix="trl-"),
        learning_rate=1e-6,
        loss_type="grpo",
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=updates,
        steps_per_generation=updates * minibatches,
        num_generations=rollout.group,
        max_completion_length=max(map(len, rollout.completions)),
        shuffle_dataset=False,
        gradient_checkpointing=checkpointing,
        **UNLOGGED,
    )
    names = [f"w{number}" for number in range(len(rollout.prompts))]
    trainer = _Timed(
        model=build(MODEL, packed=False, path=path),
        reward_funcs=_reward,
        args=config,
        train_dataset=datasets.Dataset.from_dict({"prompt": names}),
        processing_class=word_tokenizer(),
        rollout_func=_Given(rollout, names),
    )
    gate = StepGate(minibatches)
    gate.attach(trainer)

    def step() -> GRPOPhases:
        trainer.seconds.clear()
        start = time.perf_counter()
        gate.run()
        total = time.perf_counter() - start
        logprobs, scoring = trainer.seconds["logprobs"], trainer.seconds["scoring"]
        return {"logprobs": logprobs, "update": total - scoring, "other": scoring - logprobs}

    return step


class _Timed(GRPOTrainer):
    """Adds up the seconds between a rollout and the updates, and the seconds of the log-probs among them."""

    def __init__(self, **arguments: Any) -> None:
        self.seconds: Counter[str] = Counter()
        super().__init__(**arguments)

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        start = time.perf_counter()
        result = super()._generate_and_score_completions(inputs)
        self.seconds["scoring"] += time.perf_counter() - start
        return result

    def _get_per_token_logps_and_entropies(self, *arguments: Any, **keywords: Any) -> Any:
        start = time.perf_counter()
        result = super()._get_per_token_logps_and_entropies(*arguments, **keywords)
        if not torch.is_grad_enabled():
            self.seconds["logprobs"] += time.perf_counter() - start
        return result


class _Given:
    """A rollout function that draws nothing: the completions of each prompt in turn."""

    def __init__(self, rollout: Rollout, names: list[str]) -> None:
        self._rollout = rollout
        self._numbers = {name: number for number, name in enumerate(names)}

    def __call__(self, prompts: list[str], _trainer: GRPOTrainer) -> dict[str, Any]:
        seen: Counter[int] = Counter()
        prompt_ids, completions = [], []
        for name in prompts:
            number = self._numbers[name]
            prompt_ids.append(self._rollout.prompts[number])
            completions.append(self._rollout.completions[number * self._rollout.group + seen[number]])
            seen[number] += 1
        logprobs = [[LOGPROB] * len(completion) for completion in completions]
        return {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": logprobs}


def _reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [reward_of(completion) for completion in completion_ids]
