"""Token ids of data that a model has no embeddings for."""

from __future__ import annotations

from typing import Any

import pytest
import training_support as support

from core_rl.errors import BatchError
from core_rl_trainer.data.kinds import DEMONSTRATIONS, PREFERENCES, PROMPTS, ExampleKind, within_vocabulary

TEMPLATE = "{% for tool in tools or [] %}{{ tool.name }}{% endfor %}{{ messages[0].content }}"
CHAT = [{"role": "user", "content": "1"}]


@pytest.mark.parametrize(
    ("kind", "example"),
    [
        (PROMPTS, {"prompt": "1="}),
        (PROMPTS, {"prompt": CHAT, "tools": [{"name": "="}]}),
        (DEMONSTRATIONS, {"prompt": "1", "answer": "="}),
        (DEMONSTRATIONS, {"prompt": "=", "answer": "1"}),
        (DEMONSTRATIONS, {"text": "1="}),
        (PREFERENCES, {"prompt": "1", "chosen": "1", "rejected": "="}),
        (PREFERENCES, {"prompt": "1", "chosen": "=", "rejected": "1"}),
    ],
)
def test_tokens_without_embeddings_are_refused(kind: ExampleKind, example: dict[str, Any]) -> None:
    tokenizer = support.make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    chat_format, highest = support.chat_format(tokenizer), len(tokenizer) - 1
    within_vocabulary(kind, highest + 1).encode(chat_format, example)
    with pytest.raises(BatchError, match=rf"has the token '=', id {highest}, .* ids below {highest} alone"):
        within_vocabulary(kind, highest).encode(chat_format, example)
