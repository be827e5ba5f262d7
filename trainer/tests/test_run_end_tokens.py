"""End tokens of a run, and the token that ends a turn of the chat template."""

from __future__ import annotations

from typing import Any

import pytest
import training_support as support

from core_rl.errors import ConfigError
from core_rl_trainer.data.end_tokens import all_end_tokens, require_end_tokens

TURNS = "{% for m in messages %}{{ m['content'] }}END={% endfor %}"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "1"}]}
TEXT: dict[str, Any] = {"prompt": "1", "answer": "2"}


@pytest.mark.parametrize(
    ("template", "stop_token_ids", "turn_end"),
    [
        (TURNS.replace("END", "</s>"), (), None),
        (TURNS.replace("END", "<pad>"), (), "<pad> (0)"),
        (TURNS.replace("END", "<pad>"), (0,), None),
        (TURNS.replace("END", ""), (), None),
        ("{{ raise_exception('no') }}", (), None),
        ({"other": TURNS}, (), None),
        (None, (), None),
    ],
)
def test_turn_ends_beyond_the_set_are_named(
    template: Any, stop_token_ids: tuple[int, ...], turn_end: str | None
) -> None:
    tokenizer = support.make_tokenizer()
    tokenizer.chat_template = template
    ends = require_end_tokens(tokenizer, stop_token_ids)
    assert ends.texts == {**dict.fromkeys(stop_token_ids, "<pad>"), support.EOS: "</s>"}
    assert ends.for_data([TEXT, CHAT]).turn_end == turn_end
    assert ends.for_data([TEXT]).turn_end is None


def test_stop_texts_replace_end_tokens() -> None:
    tokenizer = support.make_tokenizer()
    tokenizer.eos_token = None
    assert all_end_tokens(tokenizer) == frozenset()
    assert require_end_tokens(tokenizer, stop=("=",)).texts == {}
    with pytest.raises(ConfigError, match="there is no end token"):
        require_end_tokens(tokenizer)
