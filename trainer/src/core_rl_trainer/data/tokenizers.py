"""The tokenizer of a model directory, and limits of its model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from core_rl.config.engine import ModelConfig
from core_rl.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["all_end_tokens", "context_length", "load_tokenizer", "require_end_tokens", "vocabulary_size"]

COPY = (
    "copy tokenizer.json and tokenizer_config.json of the model that it was trained from into this directory"
)
"""What to do about a directory without a tokenizer."""
CONFIGS = ("config.json", "generation_config.json")


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model directory; `ConfigError` if there is none.

    A tokenizer without an end token gets the first one of the model's configs.
    """
    from core_rl.checkpoint.end_tokens import read_tokenizer

    try:
        tokenizer = read_tokenizer(path)
    except ConfigError as error:
        raise ConfigError(f"model.path = {path!r}: {error}; {COPY}") from error
    named = [
        text for end in sorted(all_end_tokens(tokenizer)) if (text := tokenizer.convert_ids_to_tokens(end))
    ]
    if tokenizer.eos_token_id is None and named:
        tokenizer.eos_token = str(named[0])
    return tokenizer


def all_end_tokens(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids of the tokens that end a sequence: of ``tokenizer``, and of the configs of the model it was loaded with."""
    own, path = tokenizer.eos_token_id, tokenizer.name_or_path
    files = [file for name in CONFIGS if path and (file := Path(path, name)).is_file()]
    if files:
        return _model_ends(path, tuple(file.stat().st_mtime_ns for file in files))
    return frozenset() if own is None else frozenset({int(own)})


def require_end_tokens(
    tokenizer: PreTrainedTokenizerBase, stop_token_ids: Sequence[int] = (), stop: Sequence[str] = ()
) -> dict[int, str]:
    """Ids and texts of the tokens that end a sequence, ``stop_token_ids`` among them.

    Raises `ConfigError` where there is none, and no text ``stop``.
    """
    ends = sorted({*all_end_tokens(tokenizer), *stop_token_ids})
    if not ends and not stop:
        raise ConfigError(
            f"model.path = {tokenizer.name_or_path!r}: there is no end token in tokenizer_config.json (eos_token), "
            "config.json or generation_config.json (eos_token_id), so that no sequence would end; set eos_token to "
            "the token that ends a turn"
        )
    return {token: str(tokenizer.convert_ids_to_tokens(token) or "") for token in ends}


@lru_cache(maxsize=8)
def _model_ends(path: str, _modified: tuple[int, ...]) -> frozenset[int]:
    from core_rl.checkpoint.end_tokens import end_tokens
    from core_rl.toolkit.build import read_config

    return frozenset(end_tokens(read_config(ModelConfig(path=path)), path))


def vocabulary_size(path: str) -> int:
    """The number of embeddings of the text model in ``path``."""
    from core_rl.toolkit.build import read_config

    return int(read_config(ModelConfig(path=path)).get_text_config().vocab_size)


def context_length(path: str) -> int | None:
    """The most tokens of a sequence of the text model in ``path``; None where its config does not say."""
    from core_rl.backend.inference_backend import ModelLimits
    from core_rl.toolkit.build import read_config

    return ModelLimits.of(read_config(ModelConfig(path=path))).context_length
