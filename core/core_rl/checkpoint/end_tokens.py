"""End tokens of a model, one set for training, rollouts and exports, and the padding token of an exported score model.

transformers takes the score of a sequence at its last token that is no padding. Where sequences can end with the
padding token, as with pad = eos, it reads another token; where the config names none, it scores no batches.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer, GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

from core_rl.checkpoint.model_config import GENERATION, cause_of, generation_config
from core_rl.errors import ConfigError

logger = logging.getLogger(__name__)

TOKENIZER = ("tokenizer_config.json", "tokenizer.json", "special_tokens_map.json", "chat_template.jinja")
"""Files that change when the end tokens of a tokenizer do."""
COPY = (
    "copy tokenizer.json and tokenizer_config.json of the model that it was trained from into this directory"
)
"""The fix for a directory without a tokenizer."""
CONTENT = "4217"
"""Content of a message that no chat template adds by itself."""
_Ends = tuple[frozenset[int], frozenset[int]]
NO_ENDS: _Ends = (frozenset(), frozenset())
NEW_PADDING = "<|pad|>"
TOKENIZER_CONFIG, SPECIAL_TOKENS = "tokenizer_config.json", "special_tokens_map.json"


def end_tokens(
    config: PretrainedConfig, model_path: str | Path | None, tokenizer_path: str | Path | None = None
) -> tuple[int, ...]:
    """Ids of the tokens that end a sequence, sorted: of the config, the generation config and the tokenizer.

    The tokenizer is in ``tokenizer_path``, or where the model is. The tokens with which its chat templates end a turn
    are among them, unless there is no other one. Ids beyond the vocabulary, which the model cannot produce, are left
    out. Raises `ConfigError` for a generation config that cannot be read.
    """
    text = config.get_text_config()
    directory = None if model_path is None else Path(model_path)
    ids, turn_ends = set[int](), frozenset[int]()
    if directory is not None and (directory / GENERATION).is_file():
        ids |= {*_ids(generation_config(directory))}
    # A default of the config's class is an ordinary token elsewhere.
    if not ids or directory is None or "eos_token_id" in (directory / "config.json").read_text("utf-8"):
        ids |= {*_ids(config), *_ids(text)}
    if (source := tokenizer_path or model_path) is not None:
        files = [path for name in TOKENIZER if (path := Path(source, name)).is_file()]
        if files:
            end, turn_ends = _read_ends(Path(source), tuple(path.stat().st_mtime_ns for path in files))
            ids |= end
    ends = sorted(token for token in ids | turn_ends if 0 <= token < text.vocab_size)
    return tuple(ends) if ids & {*ends} else ()


def read_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model directory. Raises `ConfigError` where there is none."""
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # tokenizers raises Exception itself for files that it cannot parse
        raise ConfigError(f"its tokenizer cannot be loaded: {cause_of(error)}; {COPY}") from error
    # Where there are no files, transformers makes a tokenizer of special tokens alone.
    if tokenizer.get_vocab().keys() <= set(tokenizer.all_special_tokens):
        raise ConfigError(f"there is no tokenizer in it; {COPY}")
    if tokenizer.split_special_tokens:
        raise ConfigError(
            "split_special_tokens in tokenizer_config.json spells special tokens as letters; set it to false"
        )
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    if rate := getattr(model, "dropout", None):
        raise ConfigError(
            f"dropout = {rate} in tokenizer.json gives a text other ids each time; set it to null"
        )
    return tokenizer


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Texts of the special tokens of ``tokenizer``, by id."""
    added = {token: str(text) for token, text in tokenizer.added_tokens_decoder.items() if text.special}
    return added | dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))


def write_end_tokens(
    directory: Path, config: PretrainedConfig, ends: Collection[int], model_path: str | None
) -> None:
    """Have the generation config of an export stop at all ``ends``; a file that does already stays as it is.

    Without one, its fields come from the model in ``model_path``, whose ``config.json`` may have them.
    """
    path = directory / GENERATION
    if written := path.is_file():
        fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    else:
        # The `config` that transformers has loaded is without them.
        loaded = model_path is not None and generation_config(Path(model_path))
        fields = (loaded or GenerationConfig.from_model_config(config)).to_diff_dict()
    complete = set(_listed(fields.get("eos_token_id"))) >= set(ends)
    if written and complete:
        return
    if not complete:
        fields["eos_token_id"] = sorted(ends)
    fields.pop("_from_model_config", None)  # transformers may take the model's config instead of such a file
    path.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def _ids(config: PretrainedConfig | GenerationConfig) -> Iterable[int]:
    return _listed(getattr(config, "eos_token_id", None))


def _listed(tokens: int | Iterable[int] | None) -> Iterable[int]:
    return (tokens,) if isinstance(tokens, int) else tokens or ()


@lru_cache(maxsize=8)
def _read_ends(directory: Path, _modified: tuple[int, ...]) -> _Ends:
    """End token of a tokenizer, and end tokens of turns in its chat templates. Loading it takes up to a second."""
    try:
        tokenizer = read_tokenizer(directory)
    except ConfigError:  # only text needs a tokenizer
        return NO_ENDS
    templates = tokenizer.chat_template
    names = list(templates) if isinstance(templates, dict) else [None] if templates else []
    turn_ends = [_turn_end(tokenizer, name) for name in names]
    return _existing(tokenizer.eos_token_id), _existing(*turn_ends)


def _existing(*tokens: int | None) -> frozenset[int]:
    return frozenset(token for token in tokens if token is not None)


def _turn_end(tokenizer: PreTrainedTokenizerBase, template: str | None) -> int | None:
    """The first special token after a turn of the assistant; None where the template writes none, or refuses it."""
    messages = [{"role": role, "content": CONTENT} for role in ("user", "assistant")]
    try:
        text = str(tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False))
    except (TemplateError, TypeError, ValueError, LookupError, AttributeError):
        return None
    ids = tokenizer(text.rpartition(CONTENT)[2], add_special_tokens=False)["input_ids"]
    special = special_tokens(tokenizer)
    return next((int(token) for token in ids if token in special), None)


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
        padding = {"pad_token": str(tokenizer.convert_ids_to_tokens(token))}  # loading adds a missing token
        _update(directory / TOKENIZER_CONFIG, padding | {"padding_side": "right"})
        if (directory / SPECIAL_TOKENS).is_file():
            _update(directory / SPECIAL_TOKENS, padding)


def _set_pad(config: PretrainedConfig, token: int | None) -> None:
    for part in (config, config.get_text_config()):
        part.pad_token_id = token


def _padding_token(
    tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig, ends: Collection[int]
) -> int | None:
    special = special_tokens(tokenizer)
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


def _update(path: Path, fields: dict[str, Any]) -> None:
    present = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    path.write_text(json.dumps(present | fields, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
