"""``core-rl init``: write a recipe for a task."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from core_rl_trainer.plan.report import PlanReport
    from core_rl_trainer.recipe.starter import StarterTask


def init(
    algorithm: Annotated[
        str, typer.Option(help="grpo, ppo, sft, dpo, reward_model, … or module:Class.", show_default=False)
    ],
    model: Annotated[
        str, typer.Option(help="A directory in Hugging Face format, or a Hub id.", show_default=False)
    ],
    data: Annotated[str, typer.Option(help="The training data, such as a JSONL file.", show_default=False)],
    held_out: Annotated[
        str | None, typer.Option("--eval", help="Data for evaluation.", show_default=False)
    ] = None,
    reward: Annotated[
        str | None,
        typer.Option(
            help="FILE.py, FILE.py:FUNCTION, module:function, or text_match, integer_match, math_verify.",
            show_default=False,
        ),
    ] = None,
    column: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD=COLUMN",
            help="The column of a field that is called otherwise in the data; again for another.",
            show_default=False,
        ),
    ] = None,
    engine: Annotated[str, typer.Option(help="The train engine.")] = "fsdp",
    output: Annotated[Path, typer.Option(help="The recipe that is written.")] = Path("recipe.yaml"),
    force: Annotated[bool, typer.Option("--force", help="Overwrite the recipe.")] = False,
) -> None:
    """Write a recipe for a task, with comments, and check it as 'train --dry-run' does.

    Example: core-rl init --algorithm grpo --model Qwen/Qwen3-0.6B --data sums.jsonl --reward reward.py
    """
    from core_rl.config.hub import local_model_path
    from core_rl.errors import ConfigError

    if output.exists() and not force:
        raise ConfigError(f"{output} exists; --force overwrites it, --output FILE writes another one")
    from core_rl_trainer.data.tokenizers import context_length
    from core_rl_trainer.recipe.starter import StarterTask, columns_from, render_recipe, reward_reference

    task = StarterTask(
        algorithm=algorithm,
        engine=engine,
        model=model,
        data=data,
        held_out=held_out,
        reward=None if reward is None else reward_reference(reward),
        columns=columns_from(column or ()),
        context=context_length(local_model_path(model, field="--model")),
    )
    text = render_recipe(task, output)
    plan = _checked(text)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output {output}: cannot be written: {error.strerror}") from error
    _print_next(output, plan, task)


def _checked(text: str) -> PlanReport:
    """The plan of the recipe in ``text``; raises what ``core-rl train --dry-run`` raises."""
    from core_rl.config.loading import load_yaml
    from core_rl.errors import ConfigError, CoreRLError
    from core_rl_trainer.api import dry_run

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "recipe.yaml"
        path.write_text(text, encoding="utf-8")
        try:
            return dry_run(load_yaml(path))
        except CoreRLError as error:
            if "data.columns." in str(error):
                raise ConfigError(f"{error} (as --column FIELD=COLUMN)") from error
            raise


def _print_next(output: Path, plan: PlanReport, task: StarterTask) -> None:
    import shlex

    recipe, page = shlex.quote(str(output)), shlex.quote(f"{plan.output_dir}/index.html")
    typer.echo(
        f"{output}: {task.algorithm} with {task.engine}, {plan.workload.examples:,} examples, "
        f"{plan.sequences_per_step:,} sequences in each of {plan.steps:,} steps. It is checked. Next:\n\n"
        f"  core-rl train {recipe} --dry-run     # the plan: roles, ranks and memory\n"
        f"  core-rl train {recipe}               # train; again, after an interruption: resume\n"
        f"  python -m webbrowser {page}   # the page of the run"
    )
