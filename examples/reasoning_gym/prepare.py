"""The data of ``examples/reasoning_gym.yaml``: sums that reasoning-gym generates, without network.

    python examples/reasoning_gym/prepare.py [--output runs/reasoning-gym]

The model is that of ``examples/arithmetic/prepare.py``, which reads digits, ``+`` and ``=`` alone.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from core_rl_trainer.integrations.reasoning_gym import reasoning_gym_examples

SETTINGS = {
    "min_terms": 2,
    "max_terms": 2,
    "max_digits": 2,
    "operators": ["+"],
    "allow_parentheses": False,
}


def write(path: Path, size: int, seed: int) -> None:
    """Write ``size`` examples to ``path``."""
    examples = reasoning_gym_examples("basic_arithmetic", size=size, seed=seed, settings=SETTINGS)
    # The model knows no words: of "Calculate 23 + 45." it gets 23+45=
    prompts = ({**one, "prompt": one["metadata"]["expression"].replace(" ", "") + "="} for one in examples)
    lines = [json.dumps(example) for example in prompts]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Prepare the reasoning-gym example.")
    parser.add_argument("--output", type=Path, default=Path("runs/reasoning-gym"))
    output: Path = parser.parse_args().output
    output.mkdir(parents=True, exist_ok=True)
    write(output / "train.jsonl", 512, seed=0)
    write(output / "eval.jsonl", 64, seed=1_000_000)


if __name__ == "__main__":
    main()
