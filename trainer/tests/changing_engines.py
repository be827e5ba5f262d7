"""A recipe whose engine changes on the way, for tests of plugins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import arithmetic_support as arithmetic
from recipe_curves import Curve, Spread, curve_of, move_weights

Stages = Sequence[tuple[str, Mapping[str, int]]]
"""Engines and their layouts, two steps of each."""
SHORT = ("rollout.prompts_per_step=8", "eval_samples=1", "eval_every=2", "save_every=2")


def continued(start: Path, directory: Path, stages: Stages) -> Curve:
    """The curve of GRPO whose engine changes after each two steps."""
    source: list[str] = []
    curve: Curve = []
    for number, (engine, layout) in enumerate(stages, start=1):
        output = directory / engine
        degrees = ", ".join(f"{name}: {degree}" for name, degree in layout.items())
        changed = [f"engines.{engine}.layout={{{degrees}}}", "save_portable_every=2", f"steps={2 * number}"]
        overrides = arithmetic.overrides_for(start, engine, *SHORT, *changed, *source)
        curve += curve_of(arithmetic.recipe_of("grpo"), overrides, output)
        source = [f"resume_from={output}"]
    return curve


def violations_of_changes(directory: Path, stages: Stages) -> list[str]:
    """Differences beyond rounding between `continued` and a run that is never broken."""
    start = arithmetic.make_start(directory / "start")

    def reference(name: str, *more: str) -> Curve:
        overrides = arithmetic.overrides_for(start, "reference", *SHORT, f"steps={2 * len(stages)}", *more)
        return curve_of(arithmetic.recipe_of("grpo"), overrides, directory / name)

    base = reference("base")
    models = [move_weights(start / "model", directory / f"moved{n}", n) for n in range(4)]
    spread = Spread(base, [reference(f"run{n}", f"model.path={model}") for n, model in enumerate(models)])
    return spread.violations(continued(start, directory, stages))
