"""End tokens of a run: of the tokenizer and of the model's configs, and the token that ends a turn of its template."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import TemplateError

from core_rl.config.engine import ModelConfig
from core_rl.errors import ConfigError
from core_rl_trainer.data.examples import Example

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["EndTokens", "all_end_tokens", "require_end_tokens"]

FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json")
"""Files that name end tokens."""
CONTENT = "4217"
"""A content of messages that no template writes by itself."""


@dataclass(frozen=True, kw_only=True)
class EndTokens:
    """The tokens that end a sequence."""

    texts: Mapping[int, str]
    """Their texts, by id."""
    turn_end: str | None
    """The special token with which the chat template ends a turn, where it is no end token."""

    def for_data(self, first_examples: Iterable[Example]) -> EndTokens:
        """The same without `turn_end` where no source of data has chats, by the first example of each."""
        chats = any(
            isinstance(example.get("messages", example.get("prompt")), list) for example in first_examples
        )
        return self if chats else replace(self, turn_end=None)

    def __str__(self) -> str:
        return ", ".join(f"{text} ({token})" for token, text in self.texts.items())


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
) -> EndTokens:
    """The end tokens, with ``stop_token_ids``. Raises `ConfigError` where there is none, and no text ``stop``."""
    ends = sorted({*all_end_tokens(tokenizer), *stop_token_ids})
    if not ends and not stop:
        raise ConfigError(
            f"model.path = {tokenizer.name_or_path!r}: there is no end token with an embedding, so that no sequence "
            "would end: set eos_token in tokenizer_config.json, or eos_token_id in generation_config.json, to the "
            "token that ends a turn"
        )
    turn_end = _turn_end(tokenizer)
    return EndTokens(
        texts={token: _text(tokenizer, token) for token in ends},
        turn_end=None
        if turn_end in ends or turn_end is None
        else f"{_text(tokenizer, turn_end)} ({turn_end})",
    )


def _text(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    return str(tokenizer.convert_ids_to_tokens(token) or "")


def _turn_end(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The first special token after a turn of the assistant; None where the template writes none, or refuses it."""
    messages = [{"role": role, "content": CONTENT} for role in ("user", "assistant")]
    try:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False))
    except (TemplateError, TypeError, ValueError):  # none, none by default, or one for other messages
        return None
    ids = tokenizer(text.rpartition(CONTENT)[2], add_special_tokens=False)["input_ids"]
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    return next((token for token in ids if token in special), None)
