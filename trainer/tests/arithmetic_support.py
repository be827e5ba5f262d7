"""The arithmetic example for tests, of plugins too: its module, a start hardly warmed up, and runs of its recipes."""

from __future__ import annotations

import importlib.util
import io
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

from rich.console import Console
from training_support import curve, run_killed

from core_rl_trainer import train

EXAMPLES = Path(__file__).parents[2] / "examples"
REWARD = '''
"""A reward that a model which cannot add earns now and then."""


def right_digits(answer, sample):
    return sum(a == b for a, b in zip(answer, sample["answer"])) / 3
'''


def load_example() -> ModuleType:
    """The module ``examples/arithmetic/prepare.py``."""
    return load_module(EXAMPLES / "arithmetic" / "prepare.py")


@cache
def load_module(path: Path) -> ModuleType:
    """The module at ``path``; it stays among the imported ones."""
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def make_start(
    directory: Path, *, tool: bool = False, batch_size: int = 32, max_steps: int = 40, rows: int = 24
) -> Path:
    """The files of `prepare` after ``max_steps`` of its warm-up, with ``rows`` examples, and ``reward.py``."""
    example = load_example()
    settings = example.Settings(
        engine="reference", seed=0, batch_size=batch_size, max_steps=max_steps, tool=tool
    )
    example.prepare(settings, directory, Console(file=io.StringIO()))
    for path in directory.glob("*.jsonl"):
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:rows]))
    (directory / "reward.py").write_text(REWARD)
    return directory


def recipe_of(name: str) -> Path:
    """The recipe ``name`` of the example."""
    return EXAMPLES / f"{name}_arithmetic.yaml"


def overrides_for(start: Path, engine: str, *more: str) -> list[str]:
    """A recipe with rollouts, from ``start`` on ``engine``, with a reward that hardly trained models earn."""
    return [
        f"engine={engine}",
        f"model.path={start}/model",
        f"data.train={start}/train.jsonl",
        f"data.eval={start}/eval.jsonl",
        f"reward={start}/reward.py:right_digits",
        *more,
    ]


def check_kills_change_nothing(start: Path, engine: str, directory: Path) -> None:
    """Four steps of PPO with a critic, a checkpoint after each: broken by ``kill -9`` and unbroken, one curve."""
    short = ["rollout.prompts_per_step=4", "steps=4", "save_every=1"]
    alone = ["algorithm.args.kl_coef=0", "algorithm.args.kl_target=null"]  # no ranks for a reference
    common = overrides_for(start, engine, *short, *alone)
    unbroken, broken = directory / "unbroken", directory / "broken"
    train(recipe_of("ppo"), [*common, f"output_dir={unbroken}"], console=Console(file=io.StringIO()))
    command = [sys.executable, "-m", "core_rl.cli", "train", str(recipe_of("ppo")), *common]
    run_killed([*command, f"output_dir={broken}"], broken, seed=2, rows=(3,))
    assert curve(broken) == curve(unbroken)
    weights = [path / "model" / "model.safetensors" for path in (broken, unbroken)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
