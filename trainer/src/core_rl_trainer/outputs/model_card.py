"""The model card of a run: its recipe and its evaluations."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from core_rl_trainer.outputs.config import HubSection

__all__ = ["model_card"]

SNAPSHOT = re.compile(r"models--(?P<organization>[\w.-]+?)--(?P<name>[\w.-]+)/snapshots/")
"""The directory of a model from the Hub."""
CARD = """\
---
{head}---

# {name}

Trained by [core-rl](https://pypi.org/project/core-rl/) from {base} with `{algorithm}`, in {steps} steps on the
engine `{engine}`.
{scores}
## Recipe

```yaml
{recipe}```
"""


def model_card(
    recipe: Mapping[str, Any], datasets: Sequence[str], section: HubSection, result: Mapping[str, Any]
) -> str:
    """The text of ``README.md``, for a run of ``recipe`` on ``datasets`` of the Hub with this ``result``."""
    adapter, algorithm = section.upload == "adapter", recipe["algorithm"]["type_"]
    base = _base_model(recipe["model"]["path"])
    fields = {
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "text-classification" if algorithm == "reward_model" else "text-generation",
        "base_model": base,
        "datasets": list(datasets) or None,
        "tags": ["core-rl", algorithm],
    }
    head = {name: value for name, value in fields.items() if value is not None}
    return CARD.format(
        head=yaml.safe_dump(head, sort_keys=False),
        name=section.repo_id.split("/")[1],
        base=base or "a local model",
        algorithm=algorithm,
        steps=recipe["steps"],
        engine=recipe["engine"],
        scores="" if section.upload == "best_model" else _scores(result),
        recipe=yaml.safe_dump(recipe, sort_keys=False),
    )


def _base_model(path: str) -> str | None:
    """The Hub id of the model that the run began with; None for a local one."""
    snapshot = SNAPSHOT.search(path)
    return f"{snapshot['organization']}/{snapshot['name']}" if snapshot else None


def _scores(result: Mapping[str, Any]) -> str:
    """A table of the evaluations before and after the run."""
    before, after = result.get("before", {}), result.get("after", {})
    rows = [f"| `{name}` | {before[name]:.4g} | {after[name]:.4g} |" for name in after if name in before]
    return "\n".join(["", "| metric | before | after |", "| --- | --- | --- |", *rows, ""]) if rows else ""
