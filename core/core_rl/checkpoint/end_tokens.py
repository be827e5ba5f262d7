"""End tokens of a model: one set for training, for all rollout engines and for exports."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

from core_rl.errors import ConfigError

__all__ = ["end_tokens", "read_tokenizer", "write_end_tokens"]

GENERATION = "generation_config.json"
TOKENIZER = ("tokenizer_config.json", "tokenizer.json", "special_tokens_map.json")
"""Files that change when the end token of a tokenizer does."""


def end_tokens(
    config: PretrainedConfig, model_path: str | Path | None, tokenizer_path: str | Path | None = None
) -> tuple[int, ...]:
    """Ids of the tokens that end a sequence, sorted: of the config, the generation config and the tokenizer.

    The tokenizer is in ``tokenizer_path``, or where the model is. Ids beyond the vocabulary, which the model cannot
    produce, are left out. Raises `ConfigError` for a generation config that cannot be read.
    """
    text = config.get_text_config()
    ids = {*_ids(config), *_ids(text)}
    if model_path is not None:
        ids |= _generation_ids(Path(model_path))
    if (source := tokenizer_path or model_path) is not None:
        ids |= _tokenizer_ids(Path(source))
    return tuple(sorted(token for token in ids if 0 <= token < text.vocab_size))


def read_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model directory. Raises `ConfigError` where there is none."""
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except Exception as error:
        cause = (str(error).splitlines() or [repr(error)])[0].rstrip(" :")
        raise ConfigError(f"its tokenizer cannot be loaded: {cause}") from error
    # Where there are no files, transformers makes a tokenizer of special tokens alone.
    if tokenizer.get_vocab().keys() <= set(tokenizer.all_special_tokens):
        raise ConfigError("there is no tokenizer in it")
    return tokenizer


def write_end_tokens(directory: Path, config: PretrainedConfig, ends: Collection[int]) -> None:
    """Have the generation config of an export stop at all ``ends``; a file that does already stays as it is."""
    path = directory / GENERATION
    if path.is_file():
        fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    else:
        fields = GenerationConfig.from_model_config(config).to_diff_dict()
    if set(_listed(fields.get("eos_token_id"))) >= set(ends):
        return
    fields["eos_token_id"] = sorted(ends)
    path.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def _ids(config: PretrainedConfig | GenerationConfig) -> Iterable[int]:
    return _listed(getattr(config, "eos_token_id", None))


def _listed(tokens: int | Iterable[int] | None) -> Iterable[int]:
    return (tokens,) if isinstance(tokens, int) else tokens or ()


def _generation_ids(directory: Path) -> set[int]:
    if not (directory / GENERATION).is_file():
        return set()
    try:
        return set(_ids(GenerationConfig.from_pretrained(directory, local_files_only=True)))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{directory / GENERATION} cannot be read: {error}") from error


def _tokenizer_ids(directory: Path) -> set[int]:
    files = [path for name in TOKENIZER if (path := directory / name).is_file()]
    token = _tokenizer_end(directory, tuple(path.stat().st_mtime_ns for path in files)) if files else None
    return set() if token is None else {token}


@lru_cache(maxsize=8)
def _tokenizer_end(directory: Path, _modified: tuple[int, ...]) -> int | None:
    """The end token of a tokenizer; None where there is none. Loading one takes up to a second."""
    try:
        token = read_tokenizer(directory).eos_token_id
    except ConfigError:  # only text needs a tokenizer
        return None
    return None if token is None else int(token)
