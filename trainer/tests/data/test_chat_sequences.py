"""Sequences of chats through the structures of well-known templates, next to texts that are written by hand."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest
from chat_templates import TEMPLATES, chat_tokenizer

from core_rl.errors import BatchError, ConfigError
from core_rl_trainer.data.chat_template import ChatFormat
from core_rl_trainer.data.encoding import demonstration_sequences, encode_prompt

FORMATS = {
    name: ChatFormat(tokenizer=tokenizer, ends=frozenset({tokenizer.eos_token_id}))
    for name, tokenizer in ((name, chat_tokenizer(name)) for name in TEMPLATES)
}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str | None, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


def call(arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "arguments": arguments}}


SYSTEM = {"role": "system", "content": "s"}
RESULT = {"role": "tool", "content": "7"}
THOUGHT = "<think>\nhm\n</think>\n\n"
PLAIN = [user("a"), assistant("A"), user("b"), assistant("B")]
INLINE = [user("a"), assistant(THOUGHT + "A"), user("b"), assistant(THOUGHT + "B")]
FIELDS = [user("a"), assistant("A", reasoning="hm"), user("b"), assistant("B", thinking="hm")]
TOOLS = [user("a"), assistant(None, tool_calls=[call({"x": 1})]), RESULT, assistant("A")]
SCHEMA = {"name": "f"}


def marked(chat_format: ChatFormat, sequences: list[tuple[list[int], list[bool]]]) -> list[str]:
    """The texts of sequences, with trained tokens in ⟦ ⟧."""
    texts = []
    for ids, mask in sequences:
        parts = groupby(zip(ids, mask, strict=True), key=lambda pair: pair[1])
        decoded = [
            (trained, str(chat_format.tokenizer.decode([token for token, _ in part])))
            for trained, part in parts
        ]
        texts.append("".join(f"⟦{text}⟧" if trained else text for trained, text in decoded))
    return texts


def q(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def q_turn(text: str) -> str:
    return f"<|im_start|>assistant\n⟦{text}<|im_end|>⟧"


def ll(role: str, text: str) -> str:
    return f"<|start|>{role}<|sep|>\n\n{text}<|eot|>"


def ge(role: str, text: str) -> str:
    return f"<|turn|>{role}\n{text}<|end|>\n"


def go(role: str, text: str) -> str:
    return f"<|start|>{role}<|message|>{text}<|end|>"


NO_THOUGHT = "<think>\n\n</think>\n\n"
JSON_CALL = '{"name": "f", "parameters": {"x": 1}}'
FINAL = "<|channel|>final<|message|>"
ANALYSIS = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
GO_CALL = '<|start|>assistant⟦ to=f<|channel|>commentary<|message|>{"x": 1}<|call|>⟧'
SEQUENCES = {
    ("qwen3", "plain"): [
        q("user", "a") + q_turn(NO_THOUGHT + "A"),
        q("user", "a") + q("assistant", "A") + q("user", "b") + q_turn(NO_THOUGHT + "B"),
    ],
    ("qwen3", "inline"): [
        q("user", "a") + q_turn(THOUGHT + "A"),
        q("user", "a") + q("assistant", "A") + q("user", "b") + q_turn(THOUGHT + "B"),
    ],
    ("qwen3", "fields"): [
        q("user", "a") + q_turn(THOUGHT + "A"),
        q("user", "a") + q("assistant", "A") + q("user", "b") + q_turn(THOUGHT + "B"),
    ],
    ("qwen3", "tools"): [
        q("system", '{"name": "f"}\n')
        + q("user", "a")
        + q_turn(NO_THOUGHT + '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'),
        q("system", '{"name": "f"}\n')
        + q("user", "a")
        + q("assistant", '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>')
        + q("user", "<tool_response>7</tool_response>")
        + q_turn(NO_THOUGHT + "A"),
    ],
    ("llama3", "plain"): [
        "<s>" + ll("user", "a") + "<|start|>assistant<|sep|>\n\n⟦A<|eot|>⟧" + ll("user", "b")
        + "<|start|>assistant<|sep|>\n\n⟦B<|eot|>⟧"
    ],
    ("llama3", "inline"): [
        "<s>" + ll("user", "a") + f"<|start|>assistant<|sep|>\n\n⟦{THOUGHT}A<|eot|>⟧" + ll("user", "b")
        + f"<|start|>assistant<|sep|>\n\n⟦{THOUGHT}B<|eot|>⟧"
    ],
    ("llama3", "tools"): [
        "<s>" + ll("user", '{"name": "f"}\na') + f"<|start|>assistant<|sep|>\n\n⟦{JSON_CALL}<|eot|>⟧"
        + ll("ipython", '"7"') + "<|start|>assistant<|sep|>\n\n⟦A<|eot|>⟧"
    ],
    ("r1", "plain"): [
        "<s><|User|>a<|Assistant|><think>\n⟦\n</think>\n\nA</s>⟧",
        "<s><|User|>a<|Assistant|>A</s><|User|>b<|Assistant|><think>\n⟦\n</think>\n\nB</s>⟧",
    ],
    ("r1", "inline"): [
        "<s><|User|>a<|Assistant|><think>\n⟦hm\n</think>\n\nA</s>⟧",
        "<s><|User|>a<|Assistant|>\n\nA</s><|User|>b<|Assistant|><think>\n⟦hm\n</think>\n\nB</s>⟧",
    ],
    ("r1", "fields"): [
        "<s><|User|>a<|Assistant|><think>\n⟦hm\n</think>\n\nA</s>⟧",
        "<s><|User|>a<|Assistant|>A</s><|User|>b<|Assistant|><think>\n⟦hm\n</think>\n\nB</s>⟧",
    ],
    ("r1", "calls"): [
        '<s><|User|>a<|Assistant|><think>\n⟦\n</think>\n\n<|call|>f\n{"x": 1}<|/call|></s>⟧',
        '<s><|User|>a<|Assistant|><|call|>f\n{"x": 1}<|/call|></s><|out|>7<|/out|>⟦A</s>⟧',
    ],
    ("gemma3", "plain"): [
        "<s>" + ge("user", "a") + "<|turn|>model\n⟦A<|end|>⟧\n" + ge("user", "b") + "<|turn|>model\n⟦B<|end|>⟧"
    ],
    ("gemma3", "inline"): [
        "<s>" + ge("user", "a") + f"<|turn|>model\n⟦{THOUGHT}A<|end|>⟧\n" + ge("user", "b")
        + f"<|turn|>model\n⟦{THOUGHT}B<|end|>⟧"
    ],
    ("gpt-oss", "plain"): [
        go("user", "a") + f"<|start|>assistant⟦{FINAL}A<|return|>⟧",
        go("user", "a") + f"<|start|>assistant{FINAL}A<|end|>" + go("user", "b")
        + f"<|start|>assistant⟦{FINAL}B<|return|>⟧",
    ],
    ("gpt-oss", "fields"): [
        go("user", "a") + f"<|start|>assistant⟦{ANALYSIS}{FINAL}A<|return|>⟧",
        go("user", "a") + f"<|start|>assistant{FINAL}A<|end|>" + go("user", "b")
        + f"<|start|>assistant⟦{ANALYSIS}{FINAL}B<|return|>⟧",
    ],
    ("gpt-oss", "tools"): [
        go("developer", '{"name": "f"}') + go("user", "a") + GO_CALL + go("f", '"7"')
        + f"<|start|>assistant⟦{FINAL}A<|return|>⟧"
    ],
    ("mistral", "plain"): ["<s>[INST]a[/INST]⟦A</s>⟧[INST]b[/INST]⟦B</s>⟧"],
    ("mistral", "inline"): [f"<s>[INST]a[/INST]⟦{THOUGHT}A</s>⟧[INST]b[/INST]⟦{THOUGHT}B</s>⟧"],
    ("mistral", "system"): ["<s>[INST]s\n\na[/INST]⟦A</s>⟧", "<s>[INST]a[/INST]A</s>[INST]s\n\nb[/INST]⟦B</s>⟧"],
    ("mistral", "tools"): [
        '<s>[TOOLS][{"name": "f"}][/TOOLS][INST]a[/INST]⟦[CALLS][{"name": "f", "arguments": {"x": 1}}]</s>⟧'
        "[RESULTS]7[/RESULTS]⟦A</s>⟧"
    ],
}  # fmt: skip
EXAMPLES: dict[str, dict[str, Any]] = {
    "plain": {"messages": PLAIN},
    "inline": {"messages": INLINE},
    "fields": {"messages": FIELDS},
    "system": {"messages": [SYSTEM, *PLAIN]},
    "tools": {"messages": TOOLS, "tools": [SCHEMA]},
    "calls": {"messages": TOOLS},
}


@pytest.mark.parametrize(("name", "kind"), SEQUENCES)
def test_turns_follow_their_prompts(name: str, kind: str) -> None:
    sequences = demonstration_sequences(FORMATS[name], EXAMPLES[kind])
    assert marked(FORMATS[name], sequences) == SEQUENCES[name, kind]


SAME_CHATS = [
    [user("a"), assistant("", tool_calls=[call('{"x": 1}')]), RESULT, assistant("A")],
    [user("a"), assistant(None, tool_calls=[{"name": "f", "arguments": {"x": 1}}]), RESULT, assistant("A")],
    [user([{"type": "text", "text": "a"}]), *TOOLS[1:3], assistant([{"type": "text", "text": "A"}])],  # type: ignore[arg-type]
]


@pytest.mark.parametrize("messages", SAME_CHATS)
@pytest.mark.parametrize("name", ["qwen3", "llama3", "gpt-oss", "mistral"])
def test_forms_of_messages_render_alike(name: str, messages: list[dict[str, Any]]) -> None:
    sequences = demonstration_sequences(FORMATS[name], {"messages": messages, "tools": [SCHEMA]})
    assert marked(FORMATS[name], sequences) == SEQUENCES[name, "tools"]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({}, q_turn(NO_THOUGHT + "<b>A")),
        ({"chat_template_kwargs": {"enable_thinking": True}}, q_turn(NO_THOUGHT + "<b>A")),
        (
            {"chat_template_kwargs": {"enable_thinking": False}},
            f"<|im_start|>assistant\n{NO_THOUGHT}⟦<b>A<|im_end|>⟧",
        ),
    ],
)
def test_template_arguments_close_reasoning(row: dict[str, Any], expected: str) -> None:
    sequences = demonstration_sequences(FORMATS["qwen3"], {"prompt": [user("a")], "answer": "<b>A", **row})
    assert marked(FORMATS["qwen3"], sequences) == [q("user", "a") + expected]


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_continue_turns_of_the_assistant(name: str) -> None:
    chat_format, prompt = FORMATS[name], [user("a"), assistant("<A ")]
    ids = encode_prompt(chat_format, prompt)
    assert str(chat_format.tokenizer.decode(ids)).rstrip().endswith("<A")
    ((sequence, mask),) = demonstration_sequences(chat_format, {"prompt": prompt, "answer": "B"})
    assert sequence[: len(ids)] == ids
    assert marked(chat_format, [(sequence, mask)])[0].endswith(f"⟦B{chat_format.tokenizer.eos_token}⟧")


@pytest.mark.parametrize(
    ("name", "example", "message"),
    [
        ("gemma3", EXAMPLES["tools"], "has 'tools', which the chat template does not show"),
        ("gemma3", EXAMPLES["calls"], "refuses these messages: roles must alternate"),
        ("llama3", EXAMPLES["fields"], r"drops 'reasoning' \('hm'\) of message 2"),
        ("llama3", {"messages": [user("a"), assistant("A", tool_calls=[call({})])]}, r"drops 'content' \('A'\)"),
        ("r1", {"messages": [SYSTEM | {"content": "Be"}, *PLAIN]}, r"drops 'content' \('Be'\) of message 1 \(system\)"),
        (
            "qwen3",
            {"messages": INLINE[:2], "chat_template_kwargs": {"enable_thinking": False}},
            "has reasoning in message 2, and the generation prompt closes it",
        ),
        ("qwen3", {"messages": PLAIN, "chat_template_kwargs": {"thinking": 1}}, "did you mean 'enable_thinking'"),
        ("mistral", {"messages": [assistant("A"), *PLAIN]}, "begins with a turn of the assistant"),
        ("qwen3", {"messages": PLAIN, "documents": [{"text": "d"}]}, "has 'documents', which the chat template"),
    ],
)  # fmt: skip
def test_lost_text_is_refused(name: str, example: dict[str, Any], message: str) -> None:
    with pytest.raises(BatchError, match=message):
        demonstration_sequences(FORMATS[name], example)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"arguments": {"enable_thinkin": False}},
            "does not read 'enable_thinkin'; did you mean 'enable_thinking'",
        ),
        ({"template_name": "rag"}, "data.chat_template = 'rag' names one of several templates"),
    ],
)
def test_arguments_unknown_to_template_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        encode_prompt(ChatFormat(tokenizer=FORMATS["qwen3"].tokenizer, **changes), PLAIN[:1])
