"""The one entrance to the configs of a model directory: errors name the file and what transformers refuses."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, GenerationConfig, PretrainedConfig

from core_rl.config.engine import ModelConfig
from core_rl.config.hub import require_config
from core_rl.config.secret import leaves
from core_rl.errors import ConfigError

PLAIN_ERRORS = (OSError, ValueError, RuntimeError, SafetensorError, StrictDataclassError)
BUILD_ERRORS = (
    *PLAIN_ERRORS,
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, TypeError),
)
"""Errors of transformers for files and configs. A wrong value fails where a layer first computes with it."""
GENERATION = "generation_config.json"
NUMBER = re.compile(r"\d+(\.\d+)?")
SHOWN = 300
"""Characters of another library's error that are shown; names of all models may follow."""


def cause_of(error: Exception) -> str:
    """The text of an error of another library on one line, with its type where the text alone says little."""
    text = " ".join(str(error).partition("\nModel type should be one of")[0].split())
    if not isinstance(error, PLAIN_ERRORS) or not text:
        text = f"{type(error).__name__}: {text}"
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 2]} …"


def cause_in(model: ModelConfig, error: Exception) -> str:
    """The same, with fields of the config of ``model``, as written: names that ``error`` quotes, numbers in quotes."""
    fields = _written_fields(model)
    quoted = re.findall(r"['`](\w+)['`]", str(error))
    texts = ((path, value) for path, _, value in leaves(fields) if isinstance(value, str))
    suspects = [f"{path} = {value!r}" for path, value in texts if value in quoted or NUMBER.fullmatch(value)]
    return f"{cause_of(error)} ({', '.join(suspects)})" if suspects else cause_of(error)


def _written_fields(model: ModelConfig) -> Mapping[str, Any]:
    """The config of ``model`` as written; empty for a file that cannot be read."""
    if model.path is None:
        return model.config or {}
    with suppress(*BUILD_ERRORS):
        fields: Mapping[str, Any] = PretrainedConfig.get_config_dict(model.path, local_files_only=True)[0]
        return fields
    return {}


def read_config(model: ModelConfig) -> PretrainedConfig:
    """The transformers config that ``model`` names, with one label for a value or reward head.

    Raises `ConfigError` for a missing directory or a config that transformers refuses.
    """
    file = None if model.path is None else Path(model.path, "config.json")
    if file is not None:
        require_config(file.parent, f"model.path = {model.path!r}")
        fields = _written_fields(model)
        # transformers would replace code beside the weights.
        names = fields.get("architectures") if fields.get("auto_map") else None
        if lacking := [name for name in names or () if not hasattr(transformers, name)]:
            raise ConfigError(
                f"{file}: architectures = {lacking[0]!r} is code of the model's own (auto_map), which is not run; "
                "take a model that transformers has, or name its class there where it computes the same"
            )
    config: PretrainedConfig
    try:
        if file is None:
            config = AutoConfig.for_model(**(model.config or {}))
        else:
            config = AutoConfig.from_pretrained(file.parent, local_files_only=True, trust_remote_code=False)
    except BUILD_ERRORS as error:
        raise ConfigError(
            f"transformers refuses the model config {file or model.config}: {cause_in(model, error)}; correct it"
        ) from error
    if model.head != "lm":
        config.num_labels = 1
    return config


def generation_config(directory: Path) -> GenerationConfig:
    """The generation config of a model: in its file, or else in its ``config.json``, as models of 2023 have it.

    Raises `ConfigError` for a file that cannot be read, and for end tokens that are no ids.
    """
    file = directory / GENERATION
    file = file if file.is_file() else directory / "config.json"
    try:
        config = GenerationConfig.from_pretrained(
            directory, file.name, local_files_only=True, _from_model_config=file.name != GENERATION
        )
    except BUILD_ERRORS as error:
        raise ConfigError(f"{file}: its fields of generation cannot be read: {cause_of(error)}") from error
    ends = config.eos_token_id
    if ends is not None and any(type(end) is not int for end in (ends if isinstance(ends, list) else [ends])):
        raise ConfigError(f"{file}: eos_token_id is {str(ends)[:80]!r}; write a token id, or a list of them")
    return config
