"""Files of a model that are copied next to its weights: the tokenizer with its chat template, and further configs."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from core_rl.errors import CheckpointError

__all__ = ["copy_model_files", "copy_tokenizer", "tokenizer_files"]

MODEL_FILES = ("generation_config.json", "*processor_config.json")
"""Configs of generation, and of processors that a vision tower's server reads images with."""
TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.tiktoken",
    "spiece.model",
    "sentencepiece*.model",
    "chat_template*",
    "additional_chat_templates/*",
)


def tokenizer_files(directory: Path) -> list[Path]:
    """Files of the tokenizer in ``directory``, its chat templates included; sorted."""
    return _matching(directory, TOKENIZER_FILES)


def copy_model_files(model_path: str | None, directory: Path) -> None:
    """Copy `MODEL_FILES` from where the model was."""
    if model_path is not None:
        _copy(Path(model_path), MODEL_FILES, directory)


def copy_tokenizer(tokenizer_path: str | None, model_path: str | None, directory: Path) -> None:
    """Copy the tokenizer from ``tokenizer_path``, or from where the model was.

    Raises `CheckpointError` when ``tokenizer_path`` holds none.
    """
    source = tokenizer_path or model_path
    copied = 0 if source is None else _copy(Path(source), TOKENIZER_FILES, directory)
    if tokenizer_path is not None and not copied:
        raise CheckpointError(
            f"tokenizer_path = {tokenizer_path!r} holds no tokenizer files; correct the path"
        )


def _copy(source: Path, patterns: Sequence[str], directory: Path) -> int:
    paths = _matching(source, patterns)
    for path in paths:
        target = directory / path.relative_to(source)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, target)
    return len(paths)


def _matching(directory: Path, patterns: Sequence[str]) -> list[Path]:
    return sorted({path for pattern in patterns for path in directory.glob(pattern) if path.is_file()})
