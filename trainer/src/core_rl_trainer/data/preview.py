"""An example as the model sees it, with its trained tokens marked."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

from core_rl_trainer.data.chat import Encoded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["decoded_runs", "marked_text"]

SHOWN = 1000
"""Characters at the beginning and at the end of a text that are shown."""


def marked_text(tokenizer: PreTrainedTokenizerBase, sequence: Encoded) -> str:
    """The decoded sequence with trained tokens in ⟦ ⟧; the middle of a long one is left out."""
    runs = decoded_runs(tokenizer, *sequence)
    text = "".join(f"⟦{part}⟧" if trained else part for trained, part in runs)
    if len(text) <= 2 * SHOWN:
        return text
    return f"{text[:SHOWN]} … {len(text) - 2 * SHOWN:,} characters … {text[-SHOWN:]}"


def decoded_runs(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], mask: Sequence[bool]
) -> list[tuple[bool, str]]:
    """The texts of consecutive tokens with the same value of ``mask``, with spaces as they are."""
    runs = groupby(zip(ids, mask, strict=True), key=itemgetter(1))
    return [
        (trained, str(tokenizer.decode([token for token, _ in run], clean_up_tokenization_spaces=False)))
        for trained, run in runs
    ]
