"""Vision-language models in plain transformers: their classes, and the arguments with images of padded rows."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)


def model_class(head: str, vision: bool) -> Any:
    """The class of transformers' for a model with this head, or with a vision tower."""
    if vision:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM if head == "lm" else AutoModelForSequenceClassification


def load_model(
    directory: Path, head: str, vision: bool, dtype: torch.dtype, options: Mapping[str, Any] | None = None
) -> PreTrainedModel:
    """The model in ``directory``, in evaluation mode and with eager attention; ``options`` replace its config's."""
    model: PreTrainedModel = model_class(head, vision).from_pretrained(
        directory,
        dtype=dtype,
        attn_implementation="eager",
        experts_implementation="eager",
        local_files_only=True,
        **(options or {}),
    )
    model.eval()
    return model


def joined_media(media: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Images of all rows, in their order."""
    names = dict.fromkeys(name for arguments in media for name in arguments)
    return {name: torch.cat([arguments[name] for arguments in media if name in arguments]) for name in names}


def media_arguments(model: PreTrainedModel, ids: Tensor, media: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Arguments for the rows ``ids [B, L]`` with their images: pixels in the dtype of ``model``, and kinds of tokens.

    Kinds are 1 for a placeholder of an image and 0 for text, under the name that the model has for them.
    """
    arguments = {
        name: value.to(model.dtype) if value.is_floating_point() else value for name, value in media.items()
    }
    if media:
        accepted = inspect.signature(type(model.base_model).forward).parameters
        kinds = (ids == model.config.image_token_id).long()
        arguments |= {name: kinds for name in ("mm_token_type_ids", "token_type_ids") if name in accepted}
    return arguments
