"""The section ``push_to_hub`` of a recipe."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from core_rl.config.base import Config

__all__ = ["HubSection"]


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
