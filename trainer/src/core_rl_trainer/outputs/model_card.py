"""The model card of a run: its recipe, its curves, and the versions that it ran with."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
import yaml

from core_rl.pages import svg_document
from core_rl_trainer.data.sources import is_hub_dataset
from core_rl_trainer.logs.page import charts_of, run_machine
from core_rl_trainer.logs.step_log import read_steps
from core_rl_trainer.outputs.config import HubSection
from core_rl_trainer.recipe.recipe import Recipe

__all__ = ["model_card"]

TEMPLATES = Path(__file__).parent / "templates"
SNAPSHOT = re.compile(r"models--(?P<organization>[\w.-]+?)--(?P<name>[\w.-]+)/snapshots/")
"""The directory of a model that came from the Hub."""
CURVES = 6
"""Charts in a card, the main ones first."""


def model_card(
    recipe: Recipe, directory: Path, section: HubSection, result: Mapping[str, Any]
) -> dict[str, bytes]:
    """``README.md`` and the curves that it shows, by their names in the repository."""
    charts = charts_of(read_steps(directory / "metrics.jsonl"))[0][:CURVES]
    curves = {f"curves/{_slug(chart.title)}.svg": svg_document(chart).encode() for chart in charts}
    adapter = section.upload == "adapter"
    classifies = recipe.algorithm.type_ == "reward_model"
    values = {
        "recipe": recipe,
        "section": section,
        "head": _front_matter(recipe, adapter=adapter, classifies=classifies),
        "base": _base_model(recipe) or "a local model",
        "adapter": adapter,
        "model_class": "AutoModelForSequenceClassification" if classifies else "AutoModelForCausalLM",
        "scores": _scores(result, best=section.upload == "best_model"),
        "best": result.get("best") if section.upload == "best_model" else None,
        "curves": dict(zip(curves, (chart.title for chart in charts), strict=True)),
        "recipe_text": yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False),
        "machine": run_machine(recipe),
    }
    text = _environment().get_template("model_card.md.jinja").render(values)
    return {"README.md": text.encode(), **curves}


def _front_matter(recipe: Recipe, *, adapter: bool, classifies: bool) -> str:
    """The fields that the Hub reads."""
    datasets = [source.path.partition("@")[0] for source in recipe.data.train if is_hub_dataset(source)]
    fields = {
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "text-classification" if classifies else "text-generation",
        "base_model": _base_model(recipe),
        "datasets": datasets or None,
        "tags": ["core-rl", recipe.algorithm.type_],
    }
    return yaml.safe_dump(
        {name: value for name, value in fields.items() if value is not None}, sort_keys=False
    )


def _base_model(recipe: Recipe) -> str | None:
    """The Hub id of the model that the run began with; None for a local one."""
    found = SNAPSHOT.search(recipe.model.path)
    return f"{found['organization']}/{found['name']}" if found else None


def _scores(result: Mapping[str, Any], *, best: bool) -> list[tuple[str, float, float]]:
    """Metrics of the evaluations before and after the run; none of the best model, which is that of another step."""
    before, after = result.get("before", {}), result.get("after", {})
    return [] if best else [(name, before[name], after[name]) for name in after if name in before]


def _slug(title: str) -> str:
    return re.sub(r"\W+", "-", title.lower(), flags=re.ASCII).strip("-")


def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
