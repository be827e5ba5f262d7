"""End tokens of a run: of the tokenizer and of the model's configs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from core_rl.config.engine import ModelConfig
from core_rl.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["all_end_tokens", "require_end_tokens", "shown"]

FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "tokenizer.json",
    "chat_template.jinja",
)
"""Files that name end tokens."""


def all_end_tokens(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids of the tokens that end a sequence: of ``tokenizer``, and of the configs of the model it was loaded with."""
    end, path = tokenizer.eos_token_id, tokenizer.name_or_path
    if path and Path(path, FILES[0]).is_file():
        files = (file for name in FILES if (file := Path(path, name)).is_file())
        return _model_ends(path, tuple(file.stat().st_mtime_ns for file in files))
    return frozenset() if end is None else frozenset({int(end)})


@lru_cache(maxsize=8)
def _model_ends(path: str, _modified: tuple[int, ...]) -> frozenset[int]:
    from core_rl.checkpoint.end_tokens import end_tokens
    from core_rl.toolkit.build import read_config

    return frozenset(end_tokens(read_config(ModelConfig(path=path)), path))


def require_end_tokens(
    tokenizer: PreTrainedTokenizerBase, stop_token_ids: Sequence[int] = (), stop: Sequence[str] = ()
) -> dict[int, str]:
    """Texts of the end tokens, and of ``stop_token_ids``, by id.

    Raises `ConfigError` where there is none, and no text ``stop``.
    """
    ends = sorted({*all_end_tokens(tokenizer), *stop_token_ids})
    if not ends and not stop:
        raise ConfigError(
            f"model.path = {tokenizer.name_or_path!r}: there is no end token with an embedding, so that no sequence "
            "would end: set eos_token in tokenizer_config.json, or eos_token_id in generation_config.json, to the "
            "token that ends a turn"
        )
    return {token: str(tokenizer.convert_ids_to_tokens(token) or "") for token in ends}


def shown(ends: Mapping[int, str]) -> str:
    """End tokens for a person."""
    return ", ".join(f"{text} ({token})" for token, text in ends.items())
