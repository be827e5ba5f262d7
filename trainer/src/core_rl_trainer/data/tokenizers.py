"""The tokenizer of a model directory, and limits of its model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from core_rl.config.engine import ModelConfig
from core_rl.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["context_length", "load_tokenizer"]

COPY = (
    "copy tokenizer.json and tokenizer_config.json of the model that it was trained from into this directory"
)
"""What to do about a directory without a tokenizer."""


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model directory; `ConfigError` if there is none."""
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        cause = str(error).splitlines()[0].rstrip(" :")
        raise ConfigError(
            f"model.path = {path!r}: its tokenizer cannot be loaded: {cause}; {COPY}"
        ) from error
    _check_vocabulary(path, tokenizer)
    return tokenizer


def _check_vocabulary(path: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer without tokens, and one with ids that the model has no embeddings for."""
    from core_rl.toolkit.build import read_config

    vocabulary = tokenizer.get_vocab()
    # Where there are no files, transformers makes a tokenizer of special tokens alone.
    if vocabulary.keys() <= set(tokenizer.all_special_tokens):
        raise ConfigError(f"model.path = {path!r}: there is no tokenizer in it; {COPY}")
    size = read_config(ModelConfig(path=path)).get_text_config().vocab_size
    highest = max(vocabulary.values())
    if highest >= size:
        raise ConfigError(
            f"model.path = {path!r}: its tokenizer has ids up to {highest:,}, and the model embeddings for {size:,}; "
            "save the model with the tokenizer that it was trained with, or resize its embeddings"
        )


def context_length(path: str) -> int | None:
    """The most tokens of a sequence of the text model in ``path``; None where its config does not say."""
    from core_rl.backend.inference_backend import ModelLimits
    from core_rl.toolkit.build import read_config

    return ModelLimits.of(read_config(ModelConfig(path=path))).context_length
