"""Token ids of chats, answers and pairs, and the rows that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import training_support as support
from transformers import GPT2Config, LlamaConfig, LlavaConfig

from core_rl.errors import BatchError, ConfigError
from core_rl_trainer.data.batches import demonstration_batch, preference_batch
from core_rl_trainer.data.encoding import (
    demonstration_sequences,
    encode_chat,
    encode_completion,
    encode_prompt,
)
from core_rl_trainer.data.examples import check_demonstration
from core_rl_trainer.data.kinds import DEMONSTRATIONS, PREFERENCES, PROMPTS
from core_rl_trainer.data.tokenizers import context_length

BOS, EOS = support.BOS, support.EOS
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '+' if message.role == 'user' else '=' }}{{ message.content }}"
    "{% if message.role == 'assistant' %}</s>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}={% endif %}"
)
CHAT = [
    {"role": "user", "content": "12"},
    {"role": "assistant", "content": "34"},
    {"role": "user", "content": "5"},
    {"role": "assistant", "content": "678"},
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return support.make_tokenizer()


@pytest.fixture(scope="module")
def chatty() -> Any:
    return support.make_tokenizer(TEMPLATE)


def single(sequences: list[Any]) -> Any:
    """The only sequence of an example."""
    (sequence,) = sequences
    return sequence


def trained_text(tokenizer: Any, ids: list[int], mask: list[bool]) -> str:
    return str(tokenizer.decode([token for token, trained in zip(ids, mask, strict=True) if trained]))


@pytest.mark.parametrize("answer", ["3", "3</s>", "3</s></s>"])
def test_answers_end_with_single_trained_eos(tokenizer: Any, answer: str) -> None:
    ids, mask = single(encode_completion(support.chat_format(tokenizer), "<s>1+2=", answer))
    assert (ids.count(BOS), ids.count(EOS), ids[0], ids[-1]) == (1, 1, BOS, EOS)
    assert trained_text(tokenizer, ids, mask) == "3</s>"


def test_all_turns_of_the_assistant_are_trained(chatty: Any) -> None:
    ids, mask = single(encode_chat(support.chat_format(chatty), CHAT))
    assert chatty.decode(ids) == "<s>+12=34</s>+5=678</s>"
    assert trained_text(chatty, ids, mask) == "34</s>678</s>"
    ids, mask = single(encode_completion(support.chat_format(chatty), CHAT[:3], "9"))
    assert trained_text(chatty, ids, mask) == "9</s>"


@pytest.mark.parametrize(
    ("change", "rendered"),
    [
        (("</s>", "</s>0"), "<s>+12=34</s>"),  # a text behind the end is cut off
        (("</s>", ""), "<s>+12=34</s>"),  # an end that is missing is added
        (("{% for", "<s>{% for"), "<s>+12=34</s>"),  # a template that writes its own beginning
    ],
)
def test_a_chat_begins_and_ends_once(change: tuple[str, str], rendered: str) -> None:
    tokenizer = support.make_tokenizer(TEMPLATE.replace(*change, 1))
    ids, mask = single(encode_chat(support.chat_format(tokenizer), CHAT[:2]))
    assert tokenizer.decode(ids) == rendered
    assert mask[-1]


def test_chat_prompt_ends_before_the_answer(chatty: Any) -> None:
    assert chatty.decode(encode_prompt(support.chat_format(chatty), CHAT[:3])) == "<s>+12=34</s>+5="


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            TEMPLATE + "{{ raise_exception('roles must alternate') if messages|length > 3 }}",
            "roles must alternate",
        ),
        ("{{ messages[-1].content }}", "rewrites what comes before message"),
    ],
)
def test_messages_refused_by_template_are_named(tmp_path: Path, template: str, message: str) -> None:
    tokenizer = support.make_tokenizer(template)
    support.write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "1+2=", "answer": 3}, {"messages": CHAT}])
    with pytest.raises(BatchError, match=rf"rows.jsonl: line 2: the chat template .*{message}"):
        support.read_dataset(DEMONSTRATIONS, tmp_path / "rows.jsonl", tokenizer)


def test_a_missing_template_is_named(tokenizer: Any, tmp_path: Path) -> None:
    support.write_jsonl(tmp_path / "data.jsonl", [{"prompt": CHAT[:1]}])
    with pytest.raises(ConfigError, match="no chat template, and the data has chat messages; add a"):
        support.read_dataset(PROMPTS, tmp_path / "data.jsonl", tokenizer)


@pytest.mark.parametrize("value", [1j, [object()], {1: 2, "1": 3}, range])
def test_prompts_refuse_columns_that_json_lacks(tokenizer: Any, value: Any) -> None:
    with pytest.raises(BatchError, match="has a column 'made' that .*; remove it, or write it as a text"):
        PROMPTS.encode(support.chat_format(tokenizer), {"prompt": "1+2=", "made": value})


def test_a_tokenizer_without_an_end_is_named() -> None:
    tokenizer = support.make_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="no end-of-sequence token to train"):
        encode_completion(support.chat_format(tokenizer), "1=", "1")


NO_OBJECTS: tuple[object, ...] = (json.dumps(json.dumps({"x": 1})), "[1]", [], 0, False)


def called(arguments: object) -> dict[str, Any]:
    """A turn that calls a function."""
    return {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": arguments}]}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "1="}, "needs an 'answer' or 'messages'"),
        ({"prompt": "1=", "answer": {"is": 1}}, "needs a text or a number as 'answer'; it has {'is': 1}"),
        ({"messages": "hello"}, "no list of objects with 'role' and 'content'"),
        ({"messages": CHAT[:1]}, "no turn of the 'assistant'"),
        ({"messages": [{"role": "user"}]}, "has 'messages' whose message 1 has no text as 'content'"),
        ({"messages": [CHAT[0], {"content": "1"}]}, "message 2 has no 'role' and 'content'"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "that is no text: 'image'"),
        (
            {"messages": [CHAT[0], called("{'x': 1}")]},
            "with arguments that are no JSON object (\"{'x': 1}\"); write",
        ),
        *[
            ({"messages": [CHAT[0], called(arguments)]}, "arguments that are no JSON object")
            for arguments in NO_OBJECTS
        ],
        ({"prompt": [{"role": "user", "content": 1}], "answer": "1"}, "no text as 'content', but 1"),
        ({"answer": "1"}, "needs a text 'prompt'; it has None"),
    ],
)
def test_a_damaged_demonstration_is_named(row: dict[str, Any], message: str) -> None:
    assert message in str(check_demonstration(row))


def test_batches_of_samples(tokenizer: Any, tmp_path: Path) -> None:
    support.write_jsonl(
        tmp_path / "a.jsonl", [{"prompt": "1=", "answer": 1}, {"prompt": "12=", "answer": "34"}]
    )
    dataset = support.read_dataset(DEMONSTRATIONS, tmp_path / "a.jsonl", tokenizer)
    batch = demonstration_batch([dataset[0], dataset[1]])
    assert batch.lengths == [5, 7]
    assert batch.loss_mask.tolist() == [*[False] * 3, True, True, *[False] * 4, True, True, True]
    pair = {"prompt": "1=", "chosen": "1", "rejected": "22"}
    support.write_jsonl(tmp_path / "b.jsonl", [pair, pair])
    pairs = support.read_dataset(PREFERENCES, tmp_path / "b.jsonl", tokenizer)
    batch = preference_batch([pairs[0], pairs[1]])
    assert batch.lengths == [5, 6, 5, 6]
    assert batch["chosen"].tolist() == [True, False, True, False]
    assert batch.unit is not None
    assert batch.unit.tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("config", [LlamaConfig(), GPT2Config(), LlavaConfig(text_config=LlamaConfig())])
def test_context_length_is_of_text_model(config: Any, tmp_path: Path) -> None:
    config.get_text_config().max_position_embeddings = 48
    config.save_pretrained(tmp_path)
    assert context_length(str(tmp_path)) == 48


def test_a_directory_without_a_config_has_no_context(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        context_length(str(tmp_path))


CALLING = (
    "{% if tools %}{{ tools | length }}{% endif %}{% for message in messages %}"
    "{{ '+' if message.role == 'user' else '=' }}{{ message.content.split('9')[-1] }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name }}{% endfor %}"
    "{% if message.role == 'assistant' %}</s>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}={% endif %}"
)
CALLS = [{"type": "function", "function": {"name": "7", "arguments": {}}}]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str | None, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


@pytest.mark.parametrize(
    ("example", "rendered", "trained"),
    [
        ({"messages": [user("1"), assistant("2")], "tools": [{"a": 1}, {}]}, "<s>2+1=2</s>", "2</s>"),
        ({"messages": [user("1"), assistant("2")], "tools": '[{"a": 1}]'}, "<s>1+1=2</s>", "2</s>"),
        ({"messages": [user("1"), assistant("2")], "tools": ['{"a": 1}', {}]}, "<s>2+1=2</s>", "2</s>"),
        ({"messages": [user("1"), assistant(None, tool_calls=CALLS)]}, "<s>+1=7</s>", "7</s>"),
        (
            {"messages": [user("1"), assistant("2", weight=0), user("3"), assistant("4", weight=1)]},
            "<s>+1=2</s>+3=4</s>",
            "4</s>",
        ),
        (
            {"messages": [user("1"), assistant("2"), user("3"), assistant("4", trainable=False)]},
            "<s>+1=2</s>",
            "2</s>",
        ),
        ({"prompt": [user("1")], "answer": "2", "tools": [{}]}, "<s>1+1=2</s>", "2</s>"),
    ],
)
def test_tools_and_marks_reach_the_template(example: dict[str, Any], rendered: str, trained: str) -> None:
    tokenizer = support.make_tokenizer(CALLING)
    ids, mask = single(demonstration_sequences(support.chat_format(tokenizer), example))
    assert (tokenizer.decode(ids), trained_text(tokenizer, ids, mask)) == (rendered, trained)


@pytest.mark.parametrize(
    ("example", "message"),
    [
        ({"messages": [user("1"), assistant("8 9 2")]}, r"drops 'content' \('8 9 2'\) of message 2"),
        ({"messages": [user("1"), assistant("2", reasoning_content="5")]}, "drops 'reasoning'"),
        ({"messages": [user("1"), assistant("2", weight=0)]}, "no turn of the assistant to train"),
        ({"messages": [user("1"), assistant("2", weight=0.5)]}, "weight = 0.5"),
        ({"messages": [user("1") | {"trainable": True}, assistant("2")]}, "only the assistant's are trained"),
        ({"messages": [user("1"), assistant("2")], "tools": ["1"]}, "no list of schemas"),
        ({"messages": [user("1"), assistant("2")], "tools": ["search"]}, "are no JSON"),
        ({"messages": [user("1"), assistant("2")], "tools": "search"}, "are no JSON"),
        ({"prompt": "1=", "answer": "2", "tools": [{}]}, "has 'tools' and a text; they need chat messages"),
    ],
)
def test_text_lost_by_rendering_is_refused(example: dict[str, Any], message: str) -> None:
    tokenizer = support.make_tokenizer(CALLING)
    with pytest.raises(BatchError, match=message):
        demonstration_sequences(support.chat_format(tokenizer), example)


def test_missing_default_template_is_refused() -> None:
    with_names = support.make_tokenizer()
    with_names.chat_template = {"tool_use": TEMPLATE, "rag": TEMPLATE}
    with pytest.raises(
        ConfigError, match="no chat template 'default'; set data.chat_template to 'tool_use' or 'rag'"
    ):
        demonstration_sequences(support.chat_format(with_names), {"messages": CHAT})
