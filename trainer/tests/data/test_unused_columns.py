"""Columns of data: trained, named as not used, or refused, with advice that leads to the right training."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import training_support as support
from chat_templates import chat_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core_rl.config.base import parse_config
from core_rl.errors import BatchError, ConfigError
from core_rl_trainer.data.batches import NumberedBatches
from core_rl_trainer.data.config import DataSection
from core_rl_trainer.data.kinds import DEMONSTRATIONS, PREFERENCES, PROMPTS, ExampleKind, images_of
from core_rl_trainer.data.plain import sample_fields
from core_rl_trainer.data.training_data import load_training_data

TEMPLATE = """\
{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for text in documents or [] %}{{ text.text }}{% endfor %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}{{ call.function.name }}({{ call.function.arguments | tojson }}){% endfor %}
{{- '<|im_end|>' }}
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TOKENIZER = chat_tokenizer("qwen3")
TOKENIZER.chat_template = TEMPLATE


def turn(role: str, text: Any, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": text, **fields}


def shared(name: str, text: str) -> dict[str, Any]:
    return {"from": name, "value": text}


@dataclass(frozen=True)
class Outcome:
    """Texts of the samples of a file: of its prompts and trained ones, of other fields, and the warnings."""

    prompts: str
    trained: list[str]
    fields: str
    warning: str


def outcome(path: Path, rows: list[dict[str, Any]], kind: ExampleKind, **section: Any) -> Outcome:
    support.write_jsonl(path, rows)
    values = parse_config(DataSection, {"train": str(path), **section}, "data")
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("core_rl_trainer.data.datasets")
    logger.addHandler(handler)
    try:
        train = load_training_data(values, kind, TOKENIZER, 0, limit=4096, vocabulary=len(TOKENIZER)).train
    finally:
        logger.removeHandler(handler)
    samples = [train[index] for index in range(len(train))]
    sequences = [sequence for sample in samples for sequence in kind.sequences(sample)]
    texts = [
        [
            str(TOKENIZER.decode([token for token, on in zip(ids, mask, strict=True) if on is side]))
            for ids, mask in sequences
        ]
        for side in (False, True)
    ]
    fields = str(samples) if kind is PROMPTS else ""  # which a reward reads
    return Outcome("|".join(texts[0]), texts[1], fields, "".join(records))


# ------------------------------------------------------------------- properties

CHAT = [shared("human", "chat-1"), shared("gpt", "chat-2")]
PLAIN = (
    *("prompt", "answer", "completion", "instruction", "input", "context", "output", "response", "system"),
    *("question", "query", "solution", "text", "id", "source", "videos", "data_source", "ability"),
    *("ground_truth", "target", "system_prompt"),
)
COLUMNS: dict[str, Any] = {
    **{name: f"text-{name}" for name in PLAIN},
    "chosen": "Q: chosen-1",
    "rejected": "Q: rejected-1",
    "chosen_response": "Q: chosen-2",
    "rejected_response": "Q: rejected-2",
    "messages": [turn("user", "message-1"), turn("assistant", "message-2", note="thought-1")],
    "conversations": CHAT,
    "conversation": json.dumps(CHAT),
    "dialog": CHAT,
    "history": [["history-1", "history-2"]],
    "tools": [{"name": "tool-1"}],
    "functions": [{"name": "function-1"}],
    "images": ["image-1"],
    "documents": [{"text": "document-1"}],
    "extra_info": {"split": "extra-1"},
    "reward_model": {"ground_truth": "gold-1"},
    "score_chosen": 8.5,
    **dict.fromkeys(("margin", "weight", "loss_weight"), 0.5),
    **dict.fromkeys(("kto_tag", "label"), False),
}
"""Columns of the formats, with texts of their own."""


def texts_of(value: object) -> list[str]:
    return re.findall(r"[a-z_]+-[a-z_0-9]+", json.dumps(value))


def advised(
    error: str, row: dict[str, Any], columns: dict[str, str]
) -> tuple[dict[str, Any], dict[str, str]] | None:
    """The row and the columns after the advice of ``error``; None where it has none that names them."""
    named = {
        name: column
        for name, column in re.findall(r"data\.columns\.(\w+)=(\w+)", error)
        if column != "COLUMN"
    }
    if named:
        return row, columns | named
    refused = re.search(
        r"has (?:a column |a )?'(\w+)'.*(?:remove the (?:column|images)|remove either)", error
    )
    if match := refused or re.search(r"has '(\w+)' and a text; they need chat messages", error):
        removed = columns.get(match[1], match[1])
        rest = {name: column for name, column in columns.items() if column != removed}
        return {name: value for name, value in row.items() if name != removed}, rest
    return None


@pytest.mark.parametrize("kind", [DEMONSTRATIONS, PREFERENCES, PROMPTS], ids=lambda kind: str(kind.name))
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(names=st.lists(st.sampled_from(sorted(COLUMNS)), min_size=2, max_size=8, unique=True))
def test_no_column_is_lost(tmp_path: Path, kind: ExampleKind, names: list[str]) -> None:
    row = {name: COLUMNS[name] for name in names}
    columns: dict[str, str] = {}
    error = ""
    for _ in range(len(names) + 2):
        try:
            result = outcome(tmp_path / "a.jsonl", [row], kind, columns=columns)
        except (BatchError, ConfigError) as refusal:
            error = str(refusal)
            assert len(error) < 1500 and "\n" not in error
            if (advice := advised(error.partition("a.jsonl")[2], row, columns)) is None:
                assert "COLUMN" in error or re.search(r"'(prompt|chosen|rejected|messages|answer)'", error)
                return
            assert advice != (row, columns), f"the advice does not help: {error}"
            row, columns = advice
        else:
            break
    else:
        pytest.fail(f"the advice never ends: {error}")
    used = result.prompts + "".join(result.trained) + result.fields
    for name, value in row.items():
        named = f"'{name}'" in result.warning
        assert named or all(text in used or ".note'" in result.warning for text in texts_of(value)), name
    for name, field in columns.items():  # the advice leads to the right side
        for text in {*texts_of(COLUMNS[field])} - {"thought-1"} if name in ("prompt", "answer") else ():
            assert text in (result.prompts if name == "prompt" else "".join(result.trained) + result.fields)


def test_values_beside_nested_columns_are_named(tmp_path: Path) -> None:
    body = {"messages": [U1, A1], "tools": [{"name": "f"}], "x.y": 1, "n": None}
    columns = {"messages": "body.messages"}
    result = outcome(tmp_path / "a.jsonl", [{"id": 3, "body": body}], DEMONSTRATIONS, columns=columns)
    assert result.warning.endswith("columns not used: 'body.tools', 'body.x.y', 'id'")


def test_unused_columns_of_later_rows_are_named(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"prompt": "1=", "answer": "1"}, {"prompt": "1=", "answer": "1", "id": 3}]
    assert outcome(tmp_path / "a.jsonl", rows, DEMONSTRATIONS).warning.endswith("columns not used: 'id'")


def test_columns_of_dropped_rows_are_not_named(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"prompt": "1=", "answer": "1"}, {"prompt": None, "answer": "1", "id": 3}]
    warning = outcome(tmp_path / "a.jsonl", rows, DEMONSTRATIONS, unusable="drop").warning
    assert "1 of 2 examples cannot be trained" in warning and "not used" not in warning


# ------------------------------------------------------------------------ tables

A1, A2 = turn("assistant", "A1"), turn("assistant", "A2")
U1, S1 = turn("user", "U1"), turn("system", "S1")
CALL = {"name": "f", "arguments": {"x": 1}}
ALPACA = {"instruction": "I", "input": "X", "output": "O"}
PAIR = {"chosen": A1, "rejected": A2}
TWO_CALLS = {"role": "assistant", "tool_calls": [{"id": name, "function": CALL} for name in ("one", "two")]}
REPLIES = [turn("tool", f"reply {name}", tool_call_id=name) for name in ("one", "two")]


def c(*turns: str) -> str:
    """A chat in which texts of the user and the assistant alternate, after a system message with ``s:``."""
    return "".join(
        f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in (item.split(":", 1) for item in turns)
    )


OPEN = "<|im_start|>assistant\n"
END = "<|im_end|>"

USED: list[tuple[ExampleKind, dict[str, Any], str, list[str]]] = [
    (DEMONSTRATIONS, ALPACA, "I\nX", ["O"]),
    (DEMONSTRATIONS, ALPACA | {"input": None, "history": [], "system": ""}, "I", ["O"]),
    (DEMONSTRATIONS, ALPACA | {"input": "", "history": "null", "tools": "[]", "system": None}, "I", ["O"]),
    (DEMONSTRATIONS, ALPACA | {"system": "S"}, c("system:S", "user:I\nX") + OPEN, ["O"]),
    (
        DEMONSTRATIONS,
        ALPACA | {"system": "S", "history": [["Q", "A"]]},
        c("system:S", "user:Q") + OPEN + "\n" + c("user:I\nX") + OPEN,
        ["A" + END + "O"],
    ),
    (
        DEMONSTRATIONS,
        {"history": '[["Q", "A"]]', "instruction": "I", "output": 3},
        c("user:Q") + OPEN + "\n" + c("user:I") + OPEN,
        ["A" + END + "3"],
    ),
    (
        DEMONSTRATIONS,
        {"history": [["Q", "A"]], "messages": [S1, U1, A1], "system": "S1"},
        c("system:S1", "user:Q") + OPEN + "\n" + c("user:U1") + OPEN,
        ["A" + END + "A1"],
    ),
    (PROMPTS, {"prompt": "P", "history": [["Q", "A"]]}, c("user:Q", "assistant:A", "user:P") + OPEN, [""]),
    (PROMPTS, {"messages": [U1], "ground_truth": ["3"], "dataset": "gsm8k"}, c("user:U1") + OPEN, [""]),
    (
        DEMONSTRATIONS,
        {
            "conversations": [
                shared("human", "U"),
                shared("function_call", json.dumps([CALL, CALL])),
                shared("observation", "R"),
                shared("GPT", "A"),
            ],
            "tools": json.dumps([{"name": "t"}]),
        },
        '{"name": "t"}' + c("user:U") + OPEN + "\n" + c("tool:R") + OPEN,
        ['f({"x": 1})' * 2 + END + "A"],
    ),
    (
        DEMONSTRATIONS,
        {
            "messages": [
                U1,
                turn("assistant", "", function_call=CALL),
                turn("function", "R"),
                turn("Model", "A"),
            ]
        },
        c("user:U1") + OPEN + "\n" + c("tool:R") + OPEN,
        ['f({"x": 1})' + END + "A"],
    ),
    (
        DEMONSTRATIONS,
        {"messages": [shared("human", "U") | {"role": None}, {**A1, "from": None, "value": None}]},
        c("user:U") + OPEN,
        ["A1"],
    ),
    (
        DEMONSTRATIONS,
        {"messages": [U1, A1 | {"loss": False}, U1, A2 | {"training": True}]},
        c("user:U1", "assistant:A1", "user:U1") + OPEN,
        ["A2"],
    ),
    *(
        (
            DEMONSTRATIONS,
            {"messages": [U1, A1 | mark, U1, A2]},
            c("user:U1", "assistant:A1", "user:U1") + OPEN,
            ["A2"],
        )
        for mark in ({"loss_mask": 0}, {"loss_scale": 0.0}, {"trainable": False, "mask": None})
    ),
    (
        DEMONSTRATIONS,
        {"messages": [U1, turn("assistant", "", function_call=json.dumps(CALL))]},
        c("user:U1") + OPEN,
        ['f({"x": 1})'],
    ),
    (PREFERENCES, {"conversations": [shared("human", "U1")], **PAIR}, c("user:U1") + OPEN, ["A1", "A2"]),
    (PREFERENCES, {"messages": [U1], "system": "S", **PAIR}, c("system:S", "user:U1") + OPEN, ["A1", "A2"]),
    (PREFERENCES, {"messages": [U1], "chosen": "A1", "rejected": "A2"}, c("user:U1") + OPEN, ["A1", "A2"]),
    (PREFERENCES, {"prompt": "U1", "chosen": [A1], "rejected": [A2]}, c("user:U1") + OPEN, ["A1", "A2"]),
    (
        PREFERENCES,
        {"prompt": "P", "chosen": "A1", "rejected": "A2", "history": [["Q", "A"]]},
        c("user:Q", "assistant:A", "user:P") + OPEN,
        ["A1", "A2"],
    ),
]
"""A row as another tool has it, the text of its prompt, and its trained texts."""


@pytest.mark.parametrize(("kind", "row", "prompt", "trained"), USED)
def test_rows_of_other_tools_are_trained(
    tmp_path: Path, kind: ExampleKind, row: dict[str, Any], prompt: str, trained: list[str]
) -> None:
    result = outcome(tmp_path / "a.jsonl", [row], kind)
    assert result.prompts == "|".join([prompt] * len(trained))
    assert result.trained == [text + END if text else "" for text in trained]
    assert not result.warning


@pytest.mark.parametrize("spelled", ["", END, f"{END}\n", f"{END}{END} {END}\n"])
def test_ends_in_messages_are_trained_once(tmp_path: Path, spelled: str) -> None:
    chat = [U1, turn("assistant", f"A{spelled}"), U1, turn("assistant", f"A{END}B{spelled}")]
    result = outcome(tmp_path / "a.jsonl", [{"messages": chat}], DEMONSTRATIONS)
    assert result.trained == [f"A{END}A{END}B{END}"]


@pytest.mark.parametrize(
    ("messages", "names"),
    [
        ([U1 | {"name": "Ann"}, A1], ["messages.name"]),
        ([U1 | {"name": "Ann"}, A1 | {"name": "Bot"}], []),  # the template shows one of them
        ([U1, A1, U1], ["messages after the last answer"]),
    ],
)
def test_unshown_messages_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, messages: list[dict[str, Any]], names: list[str]
) -> None:
    bot = "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.name }}{% endif %}{% endfor %}"
    monkeypatch.setattr(TOKENIZER, "chat_template", bot + TEMPLATE)
    result = outcome(tmp_path / "a.jsonl", [{"messages": messages}], DEMONSTRATIONS)
    assert result.warning.partition("not used: ")[2] == ", ".join(map(repr, names))


@pytest.mark.parametrize("kind", [DEMONSTRATIONS, PROMPTS], ids=lambda kind: str(kind.name))
def test_variables_of_templates_are_named(
    tmp_path: Path, kind: ExampleKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "{% generation %}{% if enable_thinking or x is defined and x.call %}{% endif %}{% endgeneration %}"
    monkeypatch.setattr(TOKENIZER, "chat_template", code + TEMPLATE)
    row = {"prompt": [U1], "answer": [A1], "enable_thinking": False}
    if kind is PROMPTS:
        row |= {"call": "x", "message": "y", "tools": None}  # fields and loop variables are none
    assert outcome(tmp_path / "a.jsonl", [row], kind).warning.endswith("columns not used: 'enable_thinking'")


REFUSALS: list[tuple[ExampleKind, dict[str, Any], str]] = [
    (
        DEMONSTRATIONS,
        {"messages": [S1, U1, A1], "system": "S"},
        "'system' that differs from the first message",
    ),
    (DEMONSTRATIONS, {"messages": [U1, A1], "system": ["S"]}, "needs a text 'system'"),
    (DEMONSTRATIONS, {"messages": [U1 | {"value": "U2"}, A1]}, "'content' and 'value' in turn 1 that differ"),
    (DEMONSTRATIONS, {"messages": [turn("critic", "U"), A1]}, "unknown role 'critic' in turn 1"),
    (DEMONSTRATIONS, {"messages": [turn("usr", "U"), A1]}, "did you mean 'user'"),
    (DEMONSTRATIONS, ALPACA | {"history": [["Q"]]}, "'history' that is no list of pairs"),
    (DEMONSTRATIONS, ALPACA | {"history": [["Q", None]]}, "'history' that is no list of pairs"),
    (DEMONSTRATIONS, ALPACA | {"history": [U1, A1]}, "'history' that is no list of pairs"),
    (DEMONSTRATIONS, {"instruction": "I", "input": 3, "output": "O"}, "needs texts as 'instruction'"),
    (DEMONSTRATIONS, {"messages": [U1, A1], "kto_tag": False}, "a column 'kto_tag' .False.: .*unpaired"),
    (DEMONSTRATIONS, {"messages": [U1, A1], "label": True}, "a column 'label' of true or false"),
    *(
        (DEMONSTRATIONS, {"messages": [U1, A1], name: [0, 1]}, f"'{name}' .*it marks turns: .*'weight' as 0")
        for name in ("loss_mask", "loss", "trainable", "loss_scale")
    ),
    (
        DEMONSTRATIONS,
        {"prompt": "P", "answer": "A", "loss_weight": 0.5},
        "'loss_weight' .0.5.: no setting reads",
    ),
    (DEMONSTRATIONS, {"prompt": {"x": "y" * 9000}, "answer": "A"}, r"'prompt'; it has .{200,400}9,009 char"),
    (DEMONSTRATIONS, {f"c{n}": 1 for n in range(900)}, r"columns are .{500,700}\(900 columns\)"),
    (DEMONSTRATIONS, {"input_ids": [5, 6], "labels": [-100, 6]}, "core-rl encodes .* tokenizer.decode"),
    (
        PREFERENCES,
        {"chosen_input_ids": [5], "rejected_input_ids": [6]},
        "core-rl encodes .* tokenizer.decode",
    ),
    (
        DEMONSTRATIONS,
        {"segments": [{"label": False, "text": "Q"}, {"label": True, "text": "A"}]},
        "write those with the label false as 'prompt', with true as 'answer'",
    ),
    (DEMONSTRATIONS, {"chat": json.dumps([U1, A1])}, "data.columns.messages=chat"),
    (PREFERENCES, {"question": "Q", "chosen": "A", "rejected": "B"}, "data.columns.prompt=question"),
    (PREFERENCES, {"prompt": "P", "chosen": ["A", "C"], "rejected": ["B"]}, "needs a text 'chosen'; it has"),
    (PREFERENCES, {"conversation": [U1], **PAIR}, "data.columns.prompt=conversation"),
    (
        PREFERENCES,
        {"input": {"messages": [U1]}, "preferred_output": [A1], "non_preferred_output": [A2]},
        r"prompt=input\.messages data\.columns\.chosen=preferred_output data\.columns\.rejected=non_preferred_output",
    ),
    (PREFERENCES, {"prompt": "P", "chosen": "A", "rejected": "B", "margin": 1.5}, "'margin' .1.5.: no loss"),
    (PREFERENCES, {"prompt": "P", **PAIR, "rejected_images": ["r.png"]}, "'rejected_images' .*both sides"),
    (
        PREFERENCES,
        {"messages": [U1, A1], "rejected_response": "B"},
        "data.columns.rejected=rejected_response",
    ),
    (PREFERENCES, {"messages": [U1, A1], "chosen_response": "B"}, "data.columns.chosen=chosen_response"),
    (PREFERENCES, {"messages": [U1, A1]}, "'rejected'; it has None.* columns are 'messages'"),
    *(
        (
            kind,
            {"prompt": "<ref-object>?", "answer": "A", "objects": {"ref": ["R"]}},
            "'<ref-object>' in a text",
        )
        for kind in (DEMONSTRATIONS, PROMPTS)
    ),
    (
        DEMONSTRATIONS,
        {"messages": [U1, turn("assistant", "<bbox>")], "objects": "[[3]]"},
        "'<bbox>' in a text",
    ),
    *(
        (DEMONSTRATIONS, {"messages": [U1, TWO_CALLS, *replies, A1]}, "reply to the tool call 'two' before")
        for replies in ([REPLIES[1], REPLIES[0]], [REPLIES[1]], [*REPLIES, U1, TWO_CALLS, *REPLIES[::-1]])
    ),
    (PROMPTS, {"prompt": [U1, TWO_CALLS, *REPLIES[::-1]]}, "reply to the tool call 'two' before"),
    (PROMPTS, {"prompt": "P", "_row": 3}, "'_row', which is a field of the trainer"),
    (PROMPTS, {"prompt": "P", "prompt_ids": [3]}, "'prompt_ids', which is a field of the trainer"),
    (DEMONSTRATIONS, ALPACA | {"label": False}, "'label' of true or false"),
    (
        PREFERENCES,
        {"prompt": "P", "completion": "A", "label": False},
        "for dpo, write 'chosen' and 'rejected'",
    ),
    (DEMONSTRATIONS, {"prompt": "P", "answer": "A", "label": "False"}, "'label' of true or false"),
    (
        DEMONSTRATIONS,
        {"system_prompt": "S", "question": "Q", "response": "A"},
        "answer=response data.columns.system=system_prompt",
    ),
    (
        PREFERENCES,
        {"prompt": "P", "response_a": "A", "response_b": "B", "winner": "response_a"},
        "data.columns.chosen=COLUMN data.columns.rejected=COLUMN",
    ),
    *(
        (DEMONSTRATIONS, {"messages": [U1, turn("assistant", text, **fields)]}, message)
        for text, fields, message in (
            ("A", {"mask": True}, "message 2 has a field 'mask'"),
            ([{"type": "tool_use", "name": "f"}], {}, "'tool_use'; write it as an entry .* 'tool_calls'"),
            ([{"type": "thinking", "thinking": "T"}], {}, "'thinking'; .*'reasoning_content'"),
            ("A", {"train_detail": [{"train": False}]}, "a field 'train_detail'"),
            ("A", {"loss_weights": 0}, "a field 'loss_weights'"),
            ("A", {"loss_mask": 0.5}, "loss_mask = 0.5"),
            ("A", {"images": ["a.png"]}, "a field 'images'"),
            ("A", {"audio": {"id": "3"}}, "a field 'audio'"),
            ("A", {"thought": "T"}, "drops 'reasoning' .'T'."),
            ("A", {"thought": "T", "reasoning": "R"}, "'reasoning' and 'thought' that differ"),
            ("", {"refusal": "no"}, "drops 'refusal' .'no'."),
            ("", {"function_calls": "f(3)"}, "drops 'function_calls'"),
            ("", {"functions": [{"name": "f"}]}, "drops 'functions'"),
            ("", {}, "has an empty turn of the assistant as message 2"),
            ([{"type": "text", "text": "A", "image": "a.png"}], {}, "a text with 'image' among its parts"),
        )
    ),
    (DEMONSTRATIONS, {"messages": [S1 | {"functions": "f"}, U1, A1]}, "drops 'functions' .'f'."),
    (PROMPTS, {"prompt": [U1 | {"image": "a.png"}]}, "a field 'image'"),
    (PROMPTS, {"prompt": [U1, A1 | {"function_calls": "f"}, U1]}, "drops 'function_calls'"),
    (PREFERENCES, {"prompt": [U1], "chosen": [A1 | {"mask": 1}], "rejected": [A2]}, "a field 'mask'"),
    (PROMPTS, {"messages": [U1, A1]}, "'messages' that end with a turn of the assistant"),
    (PROMPTS, {"conversations": CHAT}, "'conversations' that end with a turn of the assistant"),
]


@pytest.mark.parametrize(("kind", "row", "message"), REFUSALS)
def test_rows_with_unclear_columns_are_refused(
    tmp_path: Path, kind: ExampleKind, row: dict[str, Any], message: str
) -> None:
    with pytest.raises(BatchError, match=f"a.jsonl: line 1[: ].*{message}") as caught:
        outcome(tmp_path / "a.jsonl", [row], kind)
    assert len(str(caught.value)) < 1500


@pytest.mark.parametrize(
    ("replies", "template"),
    [
        (REPLIES, TEMPLATE),
        (REPLIES[:1], TEMPLATE),
        ([turn("tool", "reply"), turn("tool", "other")], TEMPLATE),
        (
            REPLIES[::-1],
            TEMPLATE.replace("{{ message.role }}", "{{ message.role }}{{ message.tool_call_id }}"),
        ),
    ],
)
def test_replies_in_order_or_by_id_are_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replies: list[dict[str, Any]], template: str
) -> None:
    monkeypatch.setattr(TOKENIZER, "chat_template", template)
    row = {"messages": [U1, TWO_CALLS, *replies, A1]}
    assert all(
        turn["content"] in outcome(tmp_path / "a.jsonl", [row], DEMONSTRATIONS).prompts for turn in replies
    )


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("context", [{"system": "S"}, {"history": [["Q", "A"]]}])
def test_sources_have_chats_or_texts(tmp_path: Path, place: int, context: dict[str, Any]) -> None:
    rows: list[dict[str, Any]] = [{"prompt": f"P{n}", "system": None} for n in range(3)]
    rows[place] |= context
    prompts = outcome(tmp_path / "a.jsonl", rows, PROMPTS).prompts.split("|<|im_start|>system")
    assert "".join(prompts).count(OPEN) - ("history" in context) == 3
    rows[place] |= {"system": "", "history": []}
    assert outcome(tmp_path / "a.jsonl", rows, PROMPTS).prompts == "P0|P1|P2"


@pytest.mark.parametrize("value", [3, "three", ["a.jpg"], {"type": "tv"}])
@pytest.mark.parametrize("name", ["media", "_media_", "_id", "index", "sequences", "source"])
def test_rewards_get_any_column(tmp_path: Path, name: str, value: Any) -> None:
    support.write_jsonl(tmp_path / "a.jsonl", [{"prompt": "P", name: value}])
    section = parse_config(DataSection, {"train": str(tmp_path / "a.jsonl")}, "data")
    data = load_training_data(section, PROMPTS, TOKENIZER, 0, limit=99, vocabulary=len(TOKENIZER))
    (sample,) = next(NumberedBatches(data.train, 1, 0))
    assert sample_fields(sample)[name] == value and not images_of(sample)


@pytest.mark.parametrize("kind", [DEMONSTRATIONS, PROMPTS])
def test_places_without_image_are_named_once(tmp_path: Path, kind: ExampleKind) -> None:
    row = {
        "prompt": "<image> and <video> and <img>a.png</img>",
        "answer": "A",
        "images": 3 if kind is PROMPTS else None,
    }
    row = {name: value for name, value in row.items() if value is not None}
    if kind is DEMONSTRATIONS:
        assert outcome(tmp_path / "a.jsonl", [row] * 2, kind).warning.endswith(
            "image: <image>, <video>, <img>"
        )
    else:
        with pytest.raises(BatchError, match="trained on text alone"):
            outcome(tmp_path / "a.jsonl", [row] * 2, kind)


def test_replaced_columns_are_named(tmp_path: Path) -> None:
    row = {"prompt": "old", "question": "Q", "answer": "A", "messages": [U1, A1]}
    result = outcome(tmp_path / "a.jsonl", [row], DEMONSTRATIONS, columns={"prompt": "question"})
    assert (result.prompts, result.trained) == ("Q", ["A" + END])
    assert "not used: 'messages', 'prompt'" in result.warning
