"""The padding token of an exported value or reward model.

transformers takes the score of a sequence at its last token that is no padding. Where sequences can end with the
padding token, as with pad = eos, it reads another token; where the config names none, it scores no batches.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from core_rl.checkpoint.end_tokens import read_tokenizer
from core_rl.errors import ConfigError

__all__ = ["set_padding"]

logger = logging.getLogger(__name__)

NEW_PADDING = "<|pad|>"
TOKENIZER_CONFIG, SPECIAL_TOKENS = "tokenizer_config.json", "special_tokens_map.json"


def set_padding(directory: Path, config: PretrainedConfig, ends: Collection[int]) -> None:
    """Give ``config`` and the tokenizer in ``directory`` one padding token that no sequence ends with.

    It is the present one, or a special token without a use, or a new one in a spare row of the embeddings. Without any,
    ``config`` has none, so that transformers refuses batches. Sequences are padded on the right, as absolute positions
    need it. ``ends`` are the end tokens.
    """
    text_config = config.get_text_config()
    try:
        tokenizer = read_tokenizer(directory)
    except ConfigError:  # token ids need none
        present = text_config.pad_token_id
        _set_pad(config, None if present in ends else present)
        return
    before = (tokenizer.pad_token_id, tokenizer.padding_side)
    token = _padding_token(tokenizer, text_config, ends)
    _set_pad(config, token)
    if token is None:
        logger.warning(
            "the export scores one sequence at a time: its tokenizer has no token to pad batches with; add a padding "
            "token to the tokenizer of the model, and resize its embeddings"
        )
    elif before != (token, "right"):
        _write_padding(directory, str(tokenizer.convert_ids_to_tokens(token)))


def _set_pad(config: PretrainedConfig, token: int | None) -> None:
    for part in (config, config.get_text_config()):
        part.pad_token_id = token


def _padding_token(
    tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig, ends: Collection[int]
) -> int | None:
    special = {token: str(added) for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    special |= dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    usable = {
        token
        for token in special
        if token < config.vocab_size and token not in ends and token != tokenizer.unk_token_id
    }
    for present in (tokenizer.pad_token_id, config.pad_token_id):
        if present in usable:
            return int(present)
    bos, templates = tokenizer.bos_token_id, str(tokenizer.chat_template)
    unused = [token for token in usable if token != bos and special[token] not in templates]
    if unused:
        return min(unused, key=lambda token: ("pad" not in special[token].lower(), token))
    tokenizer.add_special_tokens({"pad_token": NEW_PADDING})
    new = int(tokenizer.pad_token_id)
    if new < config.vocab_size:
        return new
    return bos if bos in usable else None  # a sequence begins with it


def _write_padding(directory: Path, token: str) -> None:
    """Change the files of the tokenizer alone that name the padding token; one that it lacks is added on loading."""
    _update(directory / TOKENIZER_CONFIG, {"pad_token": token, "padding_side": "right"})
    if (directory / SPECIAL_TOKENS).is_file():
        _update(directory / SPECIAL_TOKENS, {"pad_token": token})


def _update(path: Path, fields: dict[str, Any]) -> None:
    present = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    path.write_text(json.dumps(present | fields, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
