"""The upload of a complete run to the Hugging Face Hub, with a model card of its recipe and result."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import Field

from core_rl.checkpoint.manifest import MANIFEST
from core_rl.config.base import Config
from core_rl.config.hub import hub_source
from core_rl.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from huggingface_hub import HfApi

PLACE = re.compile(r"(?<=[\s'\"])(~|/[^/\s'\"]+)/([^\s'\"]*/)?(?=[^/\s'\"])")
"""The folders of an absolute path, of this machine alone."""


class HubSection(Config):
    """A repository on the Hugging Face Hub, which gets the model of a complete run with a model card.

    The token is that of ``hf auth login`` or of the variable ``HF_TOKEN``.
    """

    repo_id: str = Field(pattern=r"^[\w.-]+/[\w.-]+$")
    """``organization/name``; it is made where it does not exist."""
    private: bool = True
    """Whether a repository that is made is private."""


def require_hub() -> None:
    """Raise `ConfigError` where an upload is bound to fail."""
    import huggingface_hub

    if huggingface_hub.is_offline_mode():
        raise ConfigError(
            "push_to_hub: HF_HUB_OFFLINE forbids the upload; unset it, or leave push_to_hub out"
        )
    if huggingface_hub.get_token() is None:
        raise ConfigError("push_to_hub: there is no token; log in with `hf auth login`, or set HF_TOKEN")


def push_model(section: HubSection, model: Path, card: str, api: HfApi | None = None) -> str:
    """Upload the directory ``model`` with its ``card`` in one commit; the address of the repository.

    ``api`` replaces the Hub's, for tests. Raises `CheckpointError` when the upload fails.
    """
    from huggingface_hub import CommitOperationAdd, HfApi, errors

    files = [path for path in sorted(model.rglob("*")) if path.is_file() and path.name != MANIFEST]
    added = [CommitOperationAdd(path.relative_to(model).as_posix(), path) for path in files]
    hub = api or HfApi()
    try:
        url = hub.create_repo(section.repo_id, private=section.private, exist_ok=True)
        added.append(CommitOperationAdd("README.md", card.encode()))
        hub.create_commit(section.repo_id, added, commit_message="Upload from core-rl")
    except (OSError, ValueError, errors.HTTPError) as error:  # type: ignore[attr-defined]  # httpx's, not exported
        raise CheckpointError(
            f"push_to_hub: the upload to {section.repo_id!r} failed: {str(error).partition(chr(10))[0]}. The run is "
            f"complete, and the model is in {model}; the same command uploads it again"
        ) from error
    return str(url)


def model_card(recipe: Mapping[str, Any], repo_id: str, result: Mapping[str, Any]) -> str:
    """The text of ``README.md`` for the model of a run of ``recipe`` with this ``result``."""
    base, _ = hub_source(recipe["model"]["path"])
    algorithm = recipe["algorithm"]["type"]
    head = {"library_name": "transformers", "tags": ["core-rl", algorithm]}
    values = {name: result[name] for name in ("before", "after") if result.get(name)}
    sections = (
        f"---\n{yaml.safe_dump(head | ({'base_model': base} if base else {}), sort_keys=False)}---",
        f"# {repo_id.partition('/')[2]}",
        f"Trained by [core-rl](https://pypi.org/project/core-rl/) with `{algorithm}` from {base or 'a local model'}.",
        *(
            f"## {title}\n\n```yaml\n{yaml.safe_dump(part, sort_keys=False)}```"
            for title, part in (("Result", values), ("Recipe", recipe))
        ),
    )
    return PLACE.sub("", "\n\n".join(sections)) + "\n"
