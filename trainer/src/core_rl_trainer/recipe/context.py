"""What a model directory says beside its weights: its tokenizer, and how much it can read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from core_rl.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["context_length", "load_tokenizer"]


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model directory; `ConfigError` if there is none."""
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path = {path!r}: its tokenizer cannot be loaded: {error}") from error
    return tokenizer


def context_length(path: str) -> int | None:
    """The most tokens of a sequence (``max_position_embeddings``); None where the model's config does not say."""
    config = json.loads(Path(path, "config.json").read_text(encoding="utf-8"))
    found = config.get("max_position_embeddings") or config.get("n_positions")
    return int(found) if found else None
