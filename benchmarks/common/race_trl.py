"""A GRPO recipe with TRL's GRPOTrainer, until a held-out reward; a program for `quickstart_race.py`.

    CORE_RL_RACE_TARGET=0.6 python benchmarks/common/race_trl.py RECIPE [FIELD=VALUE ...]

All settings are read from the recipe. The rows in ``metrics.jsonl`` of its output have the same names as core-rl's.
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import datasets
from race_target import reached
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoTokenizer, TrainerCallback, TrainerControl, TrainerState
from trl import GRPOConfig, GRPOTrainer

from core_rl_trainer.algorithms.interface import make_interface
from core_rl_trainer.recipe.recipe import Recipe, load_recipe
from core_rl_trainer.rewards.text import integer_match


def main() -> None:
    """Train and save."""
    recipe = load_recipe(sys.argv[1], sys.argv[2:])
    config = trainer_config(recipe)
    train, held_out = (
        read_rows(sources[0].path) for sources in (recipe.data.train, recipe.data.eval) if sources
    )
    trainer = _WarmedUp(
        model=recipe.model.path,
        reward_funcs=_reward,
        args=config,
        train_dataset=train,
        eval_dataset=held_out,
        processing_class=AutoTokenizer.from_pretrained(recipe.model.path, padding_side="left"),
        callbacks=[_Stopwatch(Path(recipe.output_dir), config.steps_per_generation)],
    )
    trainer.warmup_rollouts = recipe.optimizer.schedule.warmup_steps
    trainer.train()
    trainer.save_model(f"{recipe.output_dir}/model")


def trainer_config(recipe: Recipe) -> GRPOConfig:
    """The recipe's settings, at their fastest on a CPU: no checkpointing, no logging, no saving."""
    rollout, optimizer = recipe.rollout, recipe.optimizer
    algorithm = make_interface(recipe.algorithm).config
    updates, sequences = algorithm.minibatches, rollout.prompts_per_step * rollout.group_size
    # A mean over the tokens of an update, or over its sequences.
    loss_type = "bnpo" if algorithm.loss.aggregation == "token_mean" else "grpo"
    return GRPOConfig(
        output_dir=recipe.output_dir,
        seed=recipe.seed,
        use_cpu=True,
        bf16=False,
        model_init_kwargs={"dtype": "float32"},
        gradient_checkpointing=False,
        per_device_train_batch_size=sequences // updates,
        gradient_accumulation_steps=1,
        steps_per_generation=updates,
        max_steps=recipe.steps * updates,
        num_generations=rollout.group_size,
        max_completion_length=rollout.max_new_tokens,
        temperature=1.0,
        loss_type=loss_type,
        scale_rewards="group",
        epsilon=algorithm.loss.clip_low,
        epsilon_high=algorithm.loss.clip_high,
        beta=algorithm.kl_coef,
        learning_rate=optimizer.lr,
        adam_beta1=optimizer.betas[0],
        adam_beta2=optimizer.betas[1],
        weight_decay=optimizer.weight_decay,
        max_grad_norm=optimizer.max_grad_norm,
        eval_strategy="steps",
        eval_on_start=True,
        eval_steps=recipe.eval_every * updates,
        num_generations_eval=recipe.eval_samples,
        per_device_eval_batch_size=256 * recipe.eval_samples,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def read_rows(path: str) -> datasets.Dataset:
    """Prompts with their answers."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    return datasets.Dataset.from_list([json.loads(line) for line in lines])


class _WarmedUp(GRPOTrainer):
    """Has core-rl's warm-up: linear, and a step of it for all updates on one rollout."""

    warmup_rollouts = 0

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        updates, warmup = self.args.steps_per_generation, self.warmup_rollouts
        self.lr_scheduler = LambdaLR(
            optimizer or self.optimizer, lambda update: min(1.0, (update // updates + 1) / (warmup + 1))
        )
        return self.lr_scheduler


class _Stopwatch(TrainerCallback):
    """Writes the seconds of each rollout with its updates, and the reward of each evaluation."""

    def __init__(self, output: Path, updates: int) -> None:
        output.mkdir(parents=True)
        self._file, self._updates = output / "metrics.jsonl", updates
        self._seconds: defaultdict[int, float] = defaultdict(float)
        self._start = 0.0

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._start = time.perf_counter()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        step = (state.global_step - 1) // self._updates + 1
        self._seconds[step] += time.perf_counter() - self._start
        if state.global_step % self._updates == 0:
            self._write({"step": step, "time_step_s": self._seconds[step]})

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **keywords: Any) -> None:
        reward = keywords["logs"].get("eval_reward")
        if reward is not None:
            self._write({"step": state.global_step // self._updates, "eval_reward": reward})
            control.should_training_stop |= reached(reward)  # or at its last step

    def _write(self, row: dict[str, float]) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def _reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]  # or one message
    return [integer_match(text, {"answer": right}) for text, right in zip(texts, answer, strict=True)]


if __name__ == "__main__":
    main()
