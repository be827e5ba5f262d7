"""The upload of a complete run to the Hugging Face Hub, with a model card of its recipe and evaluations."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml
from pydantic import Field

from core_rl.checkpoint.manifest import MANIFEST
from core_rl.config.base import Config
from core_rl.config.hub import hub_source
from core_rl.errors import CheckpointError, ConfigError
from core_rl_trainer.outputs.run_files import read_json, replace_text

if TYPE_CHECKING:
    from huggingface_hub import HfApi

RECORD = "hub.json"
"""The upload that is done."""


class HubSection(Config):
    """A repository on the Hugging Face Hub, which gets the result of a complete run with a model card.

    The token is that of ``hf auth login`` or of the variable ``HF_TOKEN``.
    """

    repo_id: str = Field(pattern=r"^[\w.-]+/[\w.-]+$")
    """``organization/name``; it is made where it does not exist."""
    private: bool = True
    """Whether a repository that is made is private."""
    upload: Literal["model", "adapter", "best_model"] = "model"
    """The trained model, its adapter alone, or the model of the best evaluation."""


def require_hub(section: HubSection | None, *, lora: bool, keeps_best: bool) -> None:
    """Raise `ConfigError` where the upload of a run with these outputs is bound to fail."""
    if section is None:
        return
    if section.upload == "adapter" and not lora:
        raise ConfigError(
            "push_to_hub.upload = 'adapter': the run trains none; set model.lora, or upload 'model'"
        )
    if section.upload == "best_model" and not keeps_best:
        raise ConfigError(
            "push_to_hub.upload = 'best_model': the run keeps none; set keep_best, or upload 'model'"
        )
    import huggingface_hub

    if huggingface_hub.is_offline_mode():
        raise ConfigError(
            "push_to_hub: HF_HUB_OFFLINE forbids the upload; unset it, or leave push_to_hub out"
        )
    if huggingface_hub.get_token() is None:
        raise ConfigError("push_to_hub: there is no token; log in with `hf auth login`, or set HF_TOKEN")


def push_run(section: HubSection, directory: Path, card: str, api: HfApi | None = None) -> str | None:
    """Upload the output that ``section`` names from the run in ``directory``, in one commit with a model ``card``.

    Returns the address of the repository; None where nothing is new. ``api`` replaces the Hub's, for tests. Raises
    `CheckpointError` when the upload fails; the run is complete all the same, and the same command tries again.
    """
    if read_json(directory / RECORD) == section.model_dump():
        return None
    import huggingface_hub
    from huggingface_hub import errors

    folder = (directory / section.upload).resolve()
    files = {**_files(folder), "README.md": card.encode()}
    operations = [
        huggingface_hub.CommitOperationAdd(path_in_repo=name, path_or_fileobj=content)
        for name, content in files.items()
    ]
    hub = api or huggingface_hub.HfApi()
    try:
        url = hub.create_repo(section.repo_id, private=section.private, exist_ok=True)
        hub.create_commit(section.repo_id, operations, commit_message="Upload from core-rl")
    except (OSError, ValueError, errors.HTTPError) as error:  # type: ignore[attr-defined]  # httpx's, not exported
        first_line = str(error).partition("\n")[0]
        raise CheckpointError(
            f"push_to_hub: the upload to {section.repo_id!r} failed: {first_line}. The run is complete, and the model "
            f"is in {folder}; the same command uploads it again"
        ) from error
    replace_text(directory / RECORD, json.dumps(section.model_dump(), indent=2) + "\n")
    return str(url)


def _files(folder: Path) -> dict[str, Path | bytes]:
    """The files of ``folder`` by their names in the repository."""
    if not folder.is_dir():
        raise CheckpointError(f"push_to_hub: there is no {folder}; nothing is uploaded")
    return {
        path.relative_to(folder).as_posix(): path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MANIFEST
    }


PATH = re.compile(r"(~|/[^/\s]+)/\S.*")
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
    adapter, algorithm = section.upload == "adapter", recipe["algorithm"]["type"]
    base, _ = hub_source(recipe["model"]["path"])
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
        recipe=yaml.safe_dump(_portable(recipe), sort_keys=False),
    )


def _portable(values: Any) -> Any:
    """``values`` with models by Hub id and revision, and other paths of this machine by their last part."""
    if isinstance(values, Mapping):
        return {name: _portable(value) for name, value in values.items()}
    if isinstance(values, list | tuple):
        return [_portable(value) for value in values]
    if not isinstance(values, str) or not PATH.fullmatch(values):
        return values
    name, revision = hub_source(values)
    return Path(values).name if name is None else f"{name}@{revision}"


def _scores(result: Mapping[str, Any]) -> str:
    """A table of the evaluations before and after the run."""
    before, after = result.get("before", {}), result.get("after", {})
    rows = [f"| `{name}` | {before[name]:.4g} | {after[name]:.4g} |" for name in after if name in before]
    return "\n".join(["", "| metric | before | after |", "| --- | --- | --- |", *rows, ""]) if rows else ""
