"""A first recipe for a task, as ``core-rl init`` writes it: commented, with settings that suit the algorithm."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import jinja2

from core_rl.errors import ConfigError
from core_rl_trainer.algorithms.interface import interface_class

__all__ = ["StarterTask", "columns_from", "render_recipe", "reward_reference"]

TEMPLATES = Path(__file__).parent / "templates"
READY_REWARDS = {
    "text_match": "core_rl_trainer.rewards.text:text_match",
    "integer_match": "core_rl_trainer.rewards.text:integer_match",
    "math_verify": "core_rl_trainer.rewards.math:math_verify",
}
"""Rewards of the trainer, by their names alone."""
PLAIN = re.compile(r"(\.{0,2}/)?[A-Za-z]([\w./:@-]*[\w/])?", re.ASCII)
"""Texts that need no quotes in YAML, unless they are among `WORDS`."""
WORDS = ("true", "false", "null")
MOST_NEW_TOKENS = 256


@dataclass(frozen=True, kw_only=True)
class StarterTask:
    """The task, as the user describes it."""

    algorithm: str
    engine: str
    model: str
    data: str
    held_out: str | None
    """Examples for evaluation."""
    reward: str | None
    """The reward where completions are generated; see `reward_reference`."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """The column of each field that is called otherwise in the data."""
    context: int | None
    """The model's context in tokens, where it has a limit."""


@dataclass(frozen=True, kw_only=True)
class _Start:
    """Settings to start an algorithm with, where the defaults of the recipe do not suit it."""

    lr: float = 1e-6
    schedule: str = "constant"
    group_size: int = 8
    critic_lr: float | None = None
    args: Mapping[str, str] = field(default_factory=dict)
    """Settings of the algorithm, as YAML, each with the comment behind it."""


_NO_KL = {"kl_coef": "0.0 # above 0: stay close to the initial model, at the price of a reference model"}
_STARTS: Mapping[str, _Start] = {
    "grpo": _Start(args={"kl_coef": "0.001 # stay close to the initial model; 0 saves the reference model"}),
    "dr_grpo": _Start(args=_NO_KL),
    "dapo": _Start(group_size=16),
    "gspo": _Start(args=_NO_KL),
    "cispo": _Start(args=_NO_KL),
    "rloo": _Start(group_size=4, args={"kl_coef": "0.05 # of the KL divergence in the reward"}),
    "reinforce_plus_plus": _Start(
        group_size=4, args={"kl_coef": "0.01 # of the KL divergence in the reward"}
    ),
    "remax": _Start(group_size=1, args={"kl_coef": "0.01 # of the KL divergence in the reward"}),
    "ppo": _Start(
        group_size=1,
        critic_lr=1e-5,
        args={
            "kl_coef": "0.01 # of the KL divergence in the reward of each token",
            "minibatches": "4 # optimizer steps in a pass over the completions of a step",
        },
    ),
    "sft": _Start(lr=1e-5, schedule="cosine"),
    "dpo": _Start(
        lr=5e-7, schedule="linear", args={"beta": "0.1 # smaller: further away from the initial model"}
    ),
    "reward_model": _Start(lr=1e-5, schedule="linear", args={"center_coef": "0.01 # keeps scores around 0"}),
}


def render_recipe(task: StarterTask, output: Path) -> str:
    """The text of a recipe for ``task``, to be written to ``output``.

    Raises `ConfigError` for an algorithm that there is not, and for a reward that it lacks or does not read.
    """
    trains_on = interface_class(task.algorithm).trains_on
    _check_reward(task, trains_on == "rollouts")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"scalar": _scalar, "rate": _rate}
    half = task.context // 2 if task.context else MOST_NEW_TOKENS
    values = {
        "task": task,
        "start": _STARTS.get(task.algorithm, _Start()),
        "trains_on": trains_on,
        "max_new_tokens": max(1, min(MOST_NEW_TOKENS, half)),
        "name": re.split(r"[:/.]", task.algorithm)[-1],
        "output": output,
    }
    return environment.get_template("recipe.yaml.jinja").render(values)


def _check_reward(task: StarterTask, generates: bool) -> None:
    if generates and task.reward is None:
        raise ConfigError(
            f"--algorithm {task.algorithm} learns from rewards: add --reward FILE.py:FUNCTION, which gets the text of "
            "a completion and the example, or --reward text_match, which compares with the field 'answer'"
        )
    if not generates and task.reward is not None:
        raise ConfigError(
            f"--algorithm {task.algorithm} trains on data and reads no reward; leave --reward out"
        )


def columns_from(assignments: Iterable[str]) -> dict[str, str]:
    """Fields and their columns, from ``FIELD=COLUMN``. Raises `ConfigError` for any other text."""
    columns = {}
    for text in assignments:
        name, separator, column = text.partition("=")
        if not (separator and name and column):
            raise ConfigError(f"--column {text}: write FIELD=COLUMN, such as --column prompt=question")
        columns[name] = column
    return columns


def reward_reference(name: str) -> str:
    """The value of the field ``reward`` for ``name``: a ready reward, a Python file with one function, or any other.

    Raises `ConfigError` for a file that cannot be read, or that has not exactly one function.
    """
    if name in READY_REWARDS:
        return READY_REWARDS[name]
    if not name.endswith(".py"):
        return name
    try:
        module = ast.parse(Path(name).read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError) as error:
        raise ConfigError(f"--reward {name}: the file cannot be read: {error}") from error
    functions = [
        node.name
        for node in module.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_")
    ]
    if len(functions) != 1:
        names = ", ".join(functions) or "none"
        raise ConfigError(f"--reward {name}: name one function of the file, {name}:FUNCTION; it has: {names}")
    return f"{name}:{functions[0]}"


def _scalar(text: str) -> str:
    """``text`` as a YAML scalar."""
    return (
        text if PLAIN.fullmatch(text) and text.lower() not in WORDS else json.dumps(text, ensure_ascii=False)
    )


def _rate(value: float) -> str:
    """A learning rate with the dot that every YAML reader needs to see a number."""
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa}e{int(exponent)}"
