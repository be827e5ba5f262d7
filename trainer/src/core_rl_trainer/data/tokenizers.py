"""The tokenizer of a model directory, and limits of its model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from core_rl.config.engine import ModelConfig
from core_rl.errors import ConfigError
from core_rl_trainer.data.end_tokens import all_end_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["context_length", "load_tokenizer", "vocabulary_size"]

COPY = (
    "copy tokenizer.json and tokenizer_config.json of the model that it was trained from into this directory"
)
"""What to do about a directory without a tokenizer."""


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model directory; `ConfigError` if there is none.

    A tokenizer without an end token, or with one beyond the embeddings, gets the first one of the model's configs.
    """
    from core_rl.checkpoint.end_tokens import read_tokenizer

    try:
        tokenizer = read_tokenizer(path)
    except ConfigError as error:
        raise ConfigError(f"model.path = {path!r}: {error}; {COPY}") from error
    ends = sorted(all_end_tokens(tokenizer))
    named = [text for end in ends if (text := tokenizer.convert_ids_to_tokens(end))]
    if tokenizer.eos_token_id not in ends and named:
        tokenizer.eos_token = str(named[0])
    return tokenizer


def vocabulary_size(path: str) -> int:
    """The number of embeddings of the text model in ``path``."""
    from core_rl.toolkit.build import read_config

    return int(read_config(ModelConfig(path=path)).get_text_config().vocab_size)


def context_length(path: str) -> int | None:
    """The most tokens of a sequence of the text model in ``path``; None where its config does not say."""
    from core_rl.backend.inference_backend import ModelLimits
    from core_rl.toolkit.build import read_config

    return ModelLimits.of(read_config(ModelConfig(path=path))).context_length
