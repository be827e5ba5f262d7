"""``core-rl init``: write a recipe to begin with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def init(
    algorithm: Annotated[str, typer.Option(help="grpo or sft.")] = "grpo",
    output: Annotated[Path, typer.Option(help="The recipe that is written.")] = Path("recipe.yaml"),
) -> None:
    """Write a recipe with comments, in which model, data and reward are to be replaced.

    Example: core-rl init --algorithm sft
    """
    from core_rl.errors import ConfigError

    starters = Path(__file__).parents[1] / "recipe" / "starters"
    recipes = {path.stem: path for path in sorted(starters.glob("*.yaml"))}
    if algorithm not in recipes:
        raise ConfigError(
            f"--algorithm {algorithm}: there are recipes for {' and '.join(recipes)}; change algorithm in one of them"
        )
    try:
        with output.open("x", encoding="utf-8") as file:
            file.write(recipes[algorithm].read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--output {output}: {error.strerror}; name a new file") from error
    typer.echo(f"{output}: replace model, data and reward; then: core-rl train {output} --dry-run")
