"""An example as the model sees it, with its trained tokens marked."""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

from core_rl_trainer.data.chat import Encoded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["marked_text"]

SHOWN = 1000
"""Characters at the beginning and at the end of a text that are shown."""


def marked_text(tokenizer: PreTrainedTokenizerBase, sequence: Encoded) -> str:
    """The decoded sequence with trained tokens in ⟦ ⟧; the middle of a long one is left out."""
    parts = groupby(zip(*sequence, strict=True), key=itemgetter(1))
    text = "".join(_marked(tokenizer, [token for token, _ in part], trained) for trained, part in parts)
    if len(text) <= 2 * SHOWN:
        return text
    return f"{text[:SHOWN]} … {len(text) - 2 * SHOWN:,} characters … {text[-SHOWN:]}"


def _marked(tokenizer: PreTrainedTokenizerBase, ids: list[int], trained: bool) -> str:
    text = str(tokenizer.decode(ids))
    return f"⟦{text}⟧" if trained else text
