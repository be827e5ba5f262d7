"""Tasks of reasoning-gym (``pip install reasoning-gym``): their data on stdout, and their scores as a reward.

python examples/gym_tasks.py > train.jsonl
core-rl train recipe.yaml data.train=train.jsonl reward=examples/gym_tasks.py:task_score
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

import reasoning_gym
from reasoning_gym.utils import extract_answer


def task_score(completion: str, sample: Mapping[str, Any]) -> float:
    """The task's score of an answer, which stands in ``<answer>`` tags or alone."""
    score = reasoning_gym.get_score_answer_fn(sample["metadata"]["source_dataset"])
    return float(
        score(extract_answer(completion) or completion.strip(), {**sample, "question": sample["prompt"]})
    )


if __name__ == "__main__":
    for entry in reasoning_gym.create_dataset("basic_arithmetic", size=512, seed=0):
        row = {"prompt": entry["question"], "answer": entry["answer"], "metadata": entry["metadata"]}
        sys.stdout.write(json.dumps(row) + "\n")
