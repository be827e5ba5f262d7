"""Data sources: file types, columns, formats of other systems, mixtures, splits, unusable rows, summaries."""

from __future__ import annotations

import csv
import gzip
import io
import json
import lzma
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import training_support as support

from core_rl.config.base import parse_config
from core_rl.errors import BatchError, ConfigError
from core_rl_trainer.data.batches import NumberedBatches
from core_rl_trainer.data.columns import mapped
from core_rl_trainer.data.config import DataSection, DataSource
from core_rl_trainer.data.datasets import MixedOrder, SampleDataset, ShuffledOrder
from core_rl_trainer.data.examples import check_demonstration
from core_rl_trainer.data.kinds import DEMONSTRATIONS, PREFERENCES, PROMPTS, ExampleKind
from core_rl_trainer.data.sources import data_files, is_missing, open_source
from core_rl_trainer.data.training_data import TrainingData, load_training_data, summarize_data
from core_rl_trainer.plan.online_checks import with_answer_checks
from core_rl_trainer.rewards.text import integer_match, text_match

LIMIT = 28


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    tokenizer = support.make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    return tokenizer


def rows_of(count: int, start: int = 0) -> list[dict[str, Any]]:
    return [{"prompt": f"{n}=", "answer": n} for n in range(start, start + count)]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    support.write_jsonl(path, rows)
    return str(path)


def load(tokenizer: Any, kind: ExampleKind = PROMPTS, seed: int = 0, **section: Any) -> TrainingData:
    values = parse_config(DataSection, section, "data")
    return load_training_data(values, kind, tokenizer, seed, limit=LIMIT, vocabulary=len(tokenizer))


def answers(data: TrainingData, count: int) -> list[Any]:
    """The ``answer`` of the first samples that are drawn."""
    loader = NumberedBatches(data.train, 4, seed=1)
    return [sample["answer"] for _ in range(count // 4) for sample in next(loader)]


# ------------------------------------------------------------------- the section


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"train": []}, "field 'train'"),
        (
            {"train": [{"path": "a", "weight": 0}]},
            "'train.0.weight' = 0: a weight is above 0; remove the source",
        ),
        ({"train": [{"path": "a", "weight": 1}, "b"]}, "give a weight to every source, or to none"),
        ({"train": "a", "eval": "b", "eval_fraction": 0.1}, "evaluation data is given twice"),
        ({"train": "a", "eval": {"path": "b", "weight": 2}}, "every example is evaluated"),
        ({"train": "a", "eval_fraction": 1}, "'eval_fraction' = 1"),
        ({"train": {"path": "a", "splits": "x"}}, "unknown field 'train.0.splits'.*did you mean 'split'"),
    ],
)
def test_a_wrong_section_names_its_field(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(DataSection, section, "data")


def test_sources_are_written_as_a_recipe_has_them() -> None:
    mixture = [{"path": "/a", "weight": 2.0}, {"path": "b/c", "split": "test", "weight": 1.0}]
    for train in ("/a.jsonl", mixture, {"path": "a/b", "config": "main"}):
        section = DataSection.model_validate({"train": train})
        assert section.model_dump(mode="json")["train"] == train
        assert DataSection.model_validate(section.model_dump()) == section


def test_names_of_the_hub_are_no_missing_files() -> None:
    names = {"org/name": False, "org/name@main": False}
    names |= {"data/train.jsonl": True, "train": True, "/no/such": True}
    assert {name: is_missing(DataSource(path=name)) for name in names} == names


# ---------------------------------------------------------------------- files

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


DAMAGED_FILES = [
    ("data.txt", b"hello\n", r"data.txt: is no JSONL file; data files are .jsonl, .json, .parquet and .csv"),
    ("data.jsonl", b"PAR1\0\0", "is no JSONL file"),
    ("data.jsonl", LFS, "data.jsonl: is a pointer of Git LFS; run `git lfs pull`"),
    ("data.parquet", LFS, "data.parquet: is a pointer of Git LFS"),
    ("data.json", b'{"version": "1",\n"data": [{}]}', "is one object with 'version', 'data'; write a list"),
    ("data.json", b'{"n": 1, "rows": [{"prompt": "1="}]}', "is one object with 'n', 'rows'; write a list"),
    ("data.json", b'{"prompt": {"0": "1="}}', r"is one object with 'prompt'; .*orient='records'"),
    ("data.json", b"[1, 2", "data.json is not JSON"),
    ("data.json", b'["a"]', "data.json: example 1 is a str; it must be an object"),
    ("data.jsonl", b"\n\n", "data.jsonl has no prompts; write one with a 'prompt' on each line"),
    ("data.jsonl", b'\n{"prompt": "1="}\n\n["1="]', "data.jsonl: line 4 is a list"),
    (
        "data.jsonl",
        b'{"prompt": "1="}\n{"prompt": "\xff"}',
        r"data.jsonl: line 2 is not UTF-8: .*; save it as UTF-8",
    ),
    ("data.jsonl", b"{\n" * 14, r"(?s)data.jsonl: 14 problems:.*line 1 .*line 10 .*- and 4 more$"),
    ("data.jsonl", b'{"question": "1="}\n', "Its columns|data.columns.prompt=question"),
    ("data.jsonl", '{"prompt": "1="}'.encode("utf-16"), "is UTF-16 or UTF-32; save it as UTF-8"),
    (
        "data.jsonl.gz",
        gzip.compress(b'{"prompt": "1="}', mtime=0)[:-9],
        "cannot be decompressed: .*end-of-stream",
    ),
    ("data.jsonl.gz", b"hello", "cannot be decompressed: Not a gzipped file"),
    ("data.jsonl.zst", b"hello", r"data.jsonl.zst: .zst files are not read; decompress it \(`zstd -d "),
    ("data.csv", b"", "data.csv is empty"),
    ("data.csv", b"prompt,answer\n\n", "data.csv has no rows"),
    ("data.csv", b"prompt;answer\n1;2\n", "line 1: .*are separated by a semicolon, and must be by a comma"),
    ("data.tsv", b"prompt,answer\n1,2\n", "are separated by a comma, and must be by a tab"),
    ("data.csv", b",prompt\n0,1\n", r"line 1: column 1 has no name; .*to_csv\(index=False\)"),
    ("data.csv", b"prompt,answer,prompt\n", "column 3 has the name 'prompt' of column 1"),
    ("data.csv", b"prompt, answer\n", "column 2, ' answer', has blanks around its name"),
    ("data.csv", b'prompt\n"1\n', "line 2 is not CSV: unexpected end of data"),
    ("data.csv", b'prompt\n\n"1"2\n', "line 3 is not CSV: ',' expected after"),
    ("data.csv", b"prompt,answer\n1\n2,3\n", "data.csv: line 2 has no cell for the column 'answer'"),
    (
        "data.csv",
        b"prompt\n1\n2,3\n",
        "line 3 has 2 cells for 1 columns: '3' comes after the column 'prompt'",
    ),
    ("data.csv", b"prompt,answer\n1,2\n\xef\xbb\xbfprompt,answer\n1,2\n", "line 3 repeats the header"),
    ("data.csv", b"prompt\n1\n\xe9\n", "line 3 is not UTF-8: at character 1 of '\ufffd'; save it as UTF-8"),
    ("data.csv", b'prompt,answer\n1,2\n"",3\n', "data.csv: line 3 needs a text 'prompt'; it has ''"),
]


@pytest.mark.parametrize(("name", "content", "message"), DAMAGED_FILES)
def test_files_of_unknown_type_are_named(
    tmp_path: Path, tokenizer: Any, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises((ConfigError, BatchError), match=message):
        load(tokenizer, train=str(tmp_path / name))


CELLS = ["068", "2", "0.50", "12345678901234567890", "true", "1e5", "2024-01-02", "null", "NA", "None"]
CELLS += ["nan", "N/A", " 1 ", "1\r\n\n2", 'say "1"', "1,2\t3;4", "", "\0"]


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".CSV", ".csv.gz"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_csv_cells_stay_text(tmp_path: Path, suffix: str, mark: str) -> None:
    text = io.StringIO(newline="")
    writer = csv.writer(text, delimiter="\t" if suffix == ".tsv" else ",")
    writer.writerows([["prompt", "answer"], [], *([f"{n}=", cell] for n, cell in enumerate(CELLS))])
    content = (mark + text.getvalue()).encode()
    path = tmp_path / f"a{suffix}"
    path.write_bytes(gzip.compress(content) if suffix.endswith(".gz") else content)
    examples = open_source(DataSource(path=str(path)))
    assert [examples[n]["answer"] for n in range(len(examples))] == CELLS


@pytest.mark.parametrize(
    "text", ["2", "0.50", "1.0", "1e3", "12345678901234567890", "-0.10", "true", '"068"']
)
def test_json_answers_keep_their_digits(tmp_path: Path, text: str) -> None:
    for suffix in (".jsonl", ".json.gz", ".JSONL.xz"):
        content = f'{{"prompt": "1=", "answer": {text}}}'.encode()
        pack: Any = {".gz": gzip.compress, ".xz": lzma.compress}.get(suffix[-3:], bytes)
        (tmp_path / f"a{suffix}").write_bytes(pack(content))
        example = open_source(DataSource(path=str(tmp_path / f"a{suffix}")))[0]
        assert check_demonstration(example) is None
        assert text_match(text.strip('"'), pickle.loads(pickle.dumps(example))) == 1.0
        assert json.loads(json.dumps(example)) == json.loads(content)  # a number for templates and endpoints


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "1=", "prompt": "2="}', "line 2 cannot be read as JSON: an object has 'prompt' twice"),
        ('{"prompt": "1=", "x": [{"y": 1, "y": 1}]}', "an object has 'y' twice"),
        ('{"prompt": "1=", "answer": NaN}', "line 2 cannot be read as JSON: NaN is no JSON"),
        ('{"prompt": "1=", "answer": 1e999}', "line 2 .*: the number 1e999 is out of range"),
        (f'{{"prompt": "1=", "answer": 1{"0" * 5000}}}', "line 2 cannot be read as JSON: Exceeds the limit"),
        ("[" * 100_000, "line 2 is nested too deeply"),
        ('\ufeff{"prompt": "2="}', "line 2 is not JSON: a byte-order mark, .* at column 1"),
        ('{"prompt": "2="}\ufeff{"prompt": "3="}', "a byte-order mark, .* at column 17"),
        ('{"prompt": ', "line 2 is not JSON: Expecting value at column 12"),
        (r'{"prompt": "1\ud83d"}', "line 2 has half of a surrogate pair .* in 'prompt', character 2"),
        (r'{"prompt": "1", "a": [{"b": ["\udc00"]}]}', r"in 'a'\[0\]\['b'\]\[0\], character 1"),
        (r'{"prompt": "1", "\ud83d": 1}', r"in the name '\\ud83d', character 1"),
    ],
)
def test_damaged_json_names_line_and_field(tmp_path: Path, tokenizer: Any, line: str, message: str) -> None:
    (tmp_path / "a.jsonl").write_text(f'{{"prompt": "1="}}\n{line}\n')
    with pytest.raises(BatchError, match=message):
        load(tokenizer, train=str(tmp_path / "a.jsonl"))


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("suffix", ["json", "jsonl"])
def test_json_list_and_byte_order_mark_are_read(tmp_path: Path, suffix: str, indent: int | None) -> None:
    (tmp_path / f"list.{suffix}").write_text(json.dumps(rows_of(2), indent=indent))
    (tmp_path / "mark.jsonl").write_bytes(b"\xef\xbb\xbf" + json.dumps(rows_of(1)[0]).encode())
    assert open_source(DataSource(path=str(tmp_path / f"list.{suffix}")))[1] == rows_of(2)[1]
    assert open_source(DataSource(path=str(tmp_path / "mark.jsonl")))[0] == rows_of(1)[0]


def test_fields_of_the_hub_are_refused_for_files(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "a.jsonl", rows_of(1))
    with pytest.raises(
        ConfigError, match="is no dataset of the Hub and has no split; leave split = 'train' out"
    ):
        load(tokenizer, train={"path": path, "split": "train"})


def test_files_of_a_recipe(tmp_path: Path) -> None:
    first, second = (write(tmp_path / name, rows_of(1)) for name in ("a.jsonl", "b.jsonl"))
    section = DataSection.model_validate({"train": [second, "org/name"], "eval": first})
    assert [*data_files(section.train), *data_files(section.eval or ())] == [Path(second), Path(first)]


# -------------------------------------------------------------------- columns


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {},
            "line 1 needs a text 'prompt'.*'question', 'solution'.*data.columns.prompt=question data.columns.answer=",
        ),
        (
            {"prompt": "query"},
            "takes 'prompt' from the column 'query', and there is none; .*'question', 'solution'",
        ),
        ({"question": "prompt"}, "Write data.columns.prompt=question"),
        ({"solution": "answers"}, "Leave it out: 'solution' is one of them"),
        ({"prompt": "question"}, "line 1 needs an 'answer' or 'messages'.*data.columns.answer=solution"),
    ],
)
def test_missing_columns_are_named_with_present_columns(
    tmp_path: Path, tokenizer: Any, columns: dict[str, str], message: str
) -> None:
    path = write(tmp_path / "a.jsonl", [{"question": "1=", "solution": "1"}])
    with pytest.raises((ConfigError, BatchError), match=message):
        load(tokenizer, DEMONSTRATIONS, train=path, columns=columns)


def test_columns_are_mapped_and_kept(tmp_path: Path, tokenizer: Any) -> None:
    row = {"question": "1=", "extra": {"answer": "7"}, "messages": [{"role": "user", "content": "2="}]}
    path = write(tmp_path / "a.jsonl", [row])
    source = {"path": path, "columns": {"answer": "extra.answer"}}
    sample = load(tokenizer, train=source, columns={"prompt": "question"}).train[0]
    assert (sample["prompt"], sample["answer"], sample["question"]) == ("1=", "7", "1=")
    assert "messages" not in sample


def test_later_example_without_mapped_column_is_named(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "a.jsonl", [{"question": "1="}, {"query": "2="}])
    with pytest.raises(BatchError, match="a.jsonl: line 2 has no 'question'; it has 'query'"):
        load(tokenizer, train=path, columns={"prompt": "question"})


# -------------------------------------------------------------------- formats

TURNS = (("system", "0"), ("user", "1="), ("assistant", "1"), ("assistant", "2"))
SYSTEM, USER, GOOD, BAD = ({"role": role, "content": text} for role, text in TURNS)
VERL = {
    "data_source": "sums",
    "prompt": [USER],
    "reward_model": {"style": "rule", "ground_truth": "1"},
    "extra_info": {"index": 3},
}


FORMATS = [
    (PROMPTS, VERL, "verl", {"answer": "1", "extra_info": {"index": 3}}),
    (PROMPTS, VERL | {"answer": "7"}, "verl", {"answer": "7"}),
    (DEMONSTRATIONS, {"prompt": "1=", "answer": "1"}, None, {}),
    (DEMONSTRATIONS, {"prompt": "1=", "completion": "1"}, "TRL prompt-completion", {"answer": "1"}),
    (DEMONSTRATIONS, {"prompt": [USER], "completion": [GOOD]}, "TRL prompt-completion", {"answer": [GOOD]}),
    (DEMONSTRATIONS, {"text": "1=1"}, "TRL language modeling", {"text": "1=1"}),
    (
        DEMONSTRATIONS,
        {"conversations": [{"from": "human", "value": "1="}, {"from": "gpt", "value": "1"}]},
        "ShareGPT",
        {"messages": [USER, GOOD]},
    ),
    (PREFERENCES, {"prompt": "1=", "chosen": "1", "rejected": "2"}, None, {}),
    (PREFERENCES, {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}, None, {"chosen": [GOOD]}),
    (
        PREFERENCES,
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
        "TRL preference with an implicit prompt",
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
    ),
    (
        PREFERENCES,
        {"prompt": " 1=", "chosen": [USER, GOOD], "rejected": [USER, BAD], "score": 3},
        "preference with whole conversations",
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD], "score": 3},
    ),
    (
        PREFERENCES,
        {"prompt": [USER], "chosen": [USER, GOOD, USER, GOOD], "rejected": [USER, GOOD, USER, BAD]},
        "preference with whole conversations",
        {"prompt": [USER, GOOD, USER], "chosen": [GOOD], "rejected": [BAD]},
    ),
    *(
        (
            PREFERENCES,
            {"messages": [USER, GOOD], "rejected": rejected},
            name,
            {"prompt": [USER], "chosen": [GOOD]},
        )
        for rejected, name in (
            ("2", None),
            (BAD, None),
            ([BAD], None),
            ([USER, BAD], "TRL preference with an implicit prompt"),
        )
    ),
    (DEMONSTRATIONS, {"messages": json.dumps([USER, GOOD])}, None, {"messages": [USER, GOOD]}),
    (PROMPTS, {"prompt": json.dumps([USER]), "tools": ""}, None, {"prompt": [USER], "tools": None}),
    (PROMPTS, {"prompt": "[1, 2]="}, None, {"prompt": "[1, 2]="}),
    (
        PREFERENCES,
        {"chosen": "1= 1", "rejected": "1= 2"},
        "TRL preference with an implicit prompt",
        {"prompt": "1=", "chosen": " 1", "rejected": " 2"},
    ),
]


@pytest.mark.parametrize(("kind", "row", "name", "fields"), FORMATS)
def test_formats_are_recognised_and_mapped(
    tmp_path: Path,
    tokenizer: Any,
    kind: ExampleKind,
    row: dict[str, Any],
    name: str | None,
    fields: dict[str, Any],
) -> None:
    path = write(tmp_path / "a.jsonl", [row])
    examples = mapped(open_source(DataSource(path=path)), {}, kind)
    assert examples.format == name
    assert {field: examples[0][field] for field in fields} == fields
    assert kind.check(examples[0]) is None
    if " " not in str(row.get("chosen")):  # of which the tokenizer has none
        assert load(tokenizer, kind, train=path).train.longest > 0


UNCLEAR_CHATS = [
    (
        PREFERENCES,
        {"prompt": "1=", "chosen": [USER, GOOD], "rejected": [USER, GOOD, USER, BAD]},
        "has a 'chosen' that is the beginning of 'rejected'",
    ),
    (
        PREFERENCES,
        {"prompt": "2=", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        "has a 'prompt' that is no",
    ),
    (
        PREFERENCES,
        {"prompt": "1=", "chosen": [USER, GOOD], "rejected": [SYSTEM, USER, BAD]},
        "do not begin with",
    ),
    (PREFERENCES, {"chosen": [GOOD], "rejected": [BAD]}, "do not begin with the same turns"),
    (
        PREFERENCES,
        {"prompt": "1=", "chosen": [USER, GOOD], "rejected": "2"},
        "has turns as 'chosen' that cannot",
    ),
    (
        PREFERENCES,
        {"prompt": [USER], "chosen": [SYSTEM, USER, GOOD], "rejected": [BAD]},
        "'chosen' that cannot",
    ),
    (
        PREFERENCES,
        {"prompt": [USER], "chosen": [USER, GOOD], "rejected": [BAD]},
        "'chosen' that cannot follow",
    ),
    (
        DEMONSTRATIONS,
        {"messages": str([USER, GOOD])},
        "has a text as 'messages' that is not JSON: .*column 3",
    ),
    (DEMONSTRATIONS, {"messages": "[]"}, "has 'messages' that are no list of objects"),
    (PROMPTS, {"prompt": str([USER])}, "has a text as 'prompt' that is not JSON"),
    (PROMPTS, {"prompt": "1=", "tools": "sum"}, "has a text as 'tools' that is not JSON"),
    (DEMONSTRATIONS, {"prompt": "1=", "completion": "2", "label": False}, "trains on unpaired preferences"),
]


@pytest.mark.parametrize(("kind", "row", "message"), UNCLEAR_CHATS)
def test_unclear_chats_name_their_line(
    tmp_path: Path, tokenizer: Any, kind: ExampleKind, row: dict[str, Any], message: str
) -> None:
    with pytest.raises(BatchError, match=f"a.jsonl: line 1 .*{message}"):
        load(tokenizer, kind, train=write(tmp_path / "a.jsonl", [row]))


def test_only_the_completion_of_a_conversation_is_trained(tmp_path: Path, tokenizer: Any) -> None:
    row = {"prompt": [USER, BAD, USER], "completion": [GOOD]}
    sample = load(tokenizer, DEMONSTRATIONS, train=write(tmp_path / "a.jsonl", [row])).train[0]
    assert sum(sample["sequences"][0][1]) == 2  # the digit and the end
    text = load(tokenizer, DEMONSTRATIONS, train=write(tmp_path / "b.jsonl", [{"text": "1=1"}])).train[0]
    assert [(len(ids), sum(mask)) for ids, mask in text["sequences"]] == [(5, 4)]


# ------------------------------------------------------------------- mixtures


def test_mixture_shares_are_exact_after_resuming() -> None:
    def order() -> MixedOrder:
        return MixedOrder([ShuffledOrder(size, 3) for size in (5, 50)], [5, 50], [3, 1])

    mixed, again = order(), order()
    drawn = [next(mixed) for _ in range(40)]
    assert sum(number < 5 for number in drawn) == 30
    three_passes = sorted(number for number in drawn[:20] if number < 5)
    assert three_passes[::3] == list(range(5))
    again.load_state_dict(json.loads(json.dumps(mixed.state_dict())))
    assert [next(again) for _ in range(40)] == [next(mixed) for _ in range(40)]


def test_mixture_numbers_all_examples_consecutively(tmp_path: Path, tokenizer: Any) -> None:
    paths = [write(tmp_path / "a.jsonl", rows_of(4)), write(tmp_path / "b.jsonl", rows_of(8, start=10))]
    plain = load(tokenizer, train=paths)
    assert [plain.train[n]["index"] for n in range(12)] == list(range(12))
    assert sorted(answers(plain, 12)) == [*range(4), *range(10, 18)]
    weighted = load(tokenizer, train=[{"path": path, "weight": 1} for path in paths])
    assert sum(answer < 10 for answer in answers(weighted, 16)) == 8


# ---------------------------------------------------------------------- splits


def test_a_split_depends_on_the_seed_alone(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "a.jsonl", rows_of(20))

    def split(seed: int) -> tuple[list[int], list[int]]:
        data = load(tokenizer, train=path, eval_fraction=0.25, seed=seed)
        assert data.held_out is not None
        return tuple([part[n]["answer"] for n in range(len(part))] for part in (data.train, data.held_out))  # type: ignore[return-value]

    train, held_out = split(0)
    assert len(held_out) == 5 and sorted(train + held_out) == list(range(20))
    assert split(0) == (train, held_out) != split(1)


@pytest.mark.parametrize(
    ("fraction", "message"),
    [
        (0.1, "= 0.1 of the 2 examples in .* holds out none; raise it"),
        (0.9, "leaves none to train on; lower it"),
    ],
)
def test_empty_split_is_refused(tmp_path: Path, tokenizer: Any, fraction: float, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        load(tokenizer, train=write(tmp_path / "a.jsonl", rows_of(2)), eval_fraction=fraction)


# -------------------------------------------------------------- unusable rows


NOTHING = {"role": "assistant", "content": ""}
PAIR = {"chosen": "2", "rejected": "3"}
EMPTY: tuple[Any, ...] = ("", None, [])
STRICT = """\
{%- for m in messages %}
{%- if not loop.first and m.role == 'user' and messages[loop.index0 - 1].role == 'user' %}
{{- raise_exception('two users in a row') }}{% endif %}{{ m.content }}{% endfor %}"""
GOLD = with_answer_checks(PROMPTS, [integer_match])


@pytest.fixture(scope="module")
def strict_tokenizer() -> Any:
    """A tokenizer with a token that the model lacks, and a template that refuses some chats."""
    tokenizer = support.make_tokenizer()
    tokenizer.add_tokens(["<new>"])
    tokenizer.chat_template = STRICT
    return tokenizer


UNUSABLE: list[tuple[ExampleKind, dict[str, Any] | str, str]] = [
    (PROMPTS, '{"prompt": ', "is not JSON"),
    (PROMPTS, {"prompt": "1+" * 20 + "="}, r"has 42 tokens, longer than the 28 tokens"),
    (PROMPTS, {"prompt": None}, "needs a text 'prompt'"),
    (PROMPTS, '{"prompt": "1\\ud800"}', "half of a surrogate pair"),
    (DEMONSTRATIONS, {"prompt": "1=", "answer": ""}, "needs an 'answer'"),
    (PREFERENCES, {"prompt": "1=", "chosen": "2", "rejected": "2"}, "equal tokens"),
    (PREFERENCES, {"prompt": "1=", "chosen": [USER, GOOD], "rejected": [USER, GOOD]}, "equal"),
    (PREFERENCES, {"chosen": "1=2", "rejected": "1=2+3"}, "is the beginning of"),
    (PREFERENCES, {"chosen": "2=", "rejected": "1="}, "begin with nothing that they share"),
    *((PREFERENCES, {"prompt": "1=", **PAIR, "chosen": value}, "needs a text 'chosen'") for value in EMPTY),
    *(
        (PREFERENCES, {"prompt": "1=", **PAIR, "rejected": value}, "needs a text 'rejected'")
        for value in EMPTY
    ),
    (PREFERENCES, {"prompt": [USER], "chosen": [GOOD], "rejected": [NOTHING]}, "needs a text 'rejected'"),
    (PREFERENCES, {"prompt": 3, **PAIR}, "needs a text 'prompt'; it has 3"),
    (PREFERENCES, {"chosen": [USER, GOOD], "rejected": None}, "needs a text 'rejected'"),
    (PREFERENCES, PAIR | {"prompt": "1=", "margin": 2}, "has a column 'margin'"),
    (
        DEMONSTRATIONS,
        {"prompt": None, "answer": None, "messages": None, "text": None},
        "needs a text 'prompt'",
    ),
    (DEMONSTRATIONS, {"messages": [{"role": "critic", "content": "1"}, GOOD]}, "the unknown role 'critic'"),
    (DEMONSTRATIONS, {"messages": [USER, USER, GOOD]}, "the chat template refuses .*users in a row"),
    (
        DEMONSTRATIONS,
        {"messages": [USER, GOOD], "tools": [{"name": "f"}]},
        "'tools', which the chat template",
    ),
    (DEMONSTRATIONS, {"prompt": "1=", "answer": "<new>"}, "has the token '<new>', id 15"),
    (DEMONSTRATIONS, {"text": "<new>1="}, "has the token '<new>', id 15"),
    (PROMPTS, {"prompt": "<new>1="}, "has the token '<new>', id 15, .* ids below 15 alone"),
    (PREFERENCES, {"prompt": "1=", **PAIR, "chosen": "<new>"}, "has the token '<new>', id 15"),
    (PREFERENCES, {"prompt": "1=", **PAIR, "rejected": "<new>"}, "has the token '<new>', id 15"),
    (PROMPTS, {"prompt": "1=", "images": ["gone.png"]}, "has 'images', and the model is trained on text"),
    (GOLD, {"prompt": "1=", "answer": "one"}, "has an 'answer' that .*cannot compare with it"),
]
"""A row that cannot be trained, and the reason."""
USABLE = {"prompt": "1=", "answer": "1", **PAIR}


@pytest.mark.parametrize(("kind", "row", "reason"), UNUSABLE)
@pytest.mark.parametrize("place", [0, 2, 4])
def test_unusable_rows_are_named_or_dropped(
    tmp_path: Path,
    strict_tokenizer: Any,
    caplog: pytest.LogCaptureFixture,
    kind: ExampleKind,
    row: dict[str, Any] | str,
    reason: str,
    place: int,
) -> None:
    def load_with(unusable: str, lines: list[str]) -> SampleDataset:
        (tmp_path / "a.jsonl").write_text("\n".join(lines))
        section = parse_config(
            DataSection, {"train": str(tmp_path / "a.jsonl"), "unusable": unusable}, "data"
        )
        return load_training_data(section, kind, strict_tokenizer, 0, limit=LIMIT, vocabulary=15).train

    lines = [json.dumps(USABLE)] * 4
    damaged = row if isinstance(row, str) else json.dumps(row)
    lines.insert(place, damaged)
    with pytest.raises(BatchError, match=rf"line {place + 1}.* {reason}.*data\.unusable=drop"):
        load_with("error", lines)
    train = load_with("drop", lines)
    assert (len(train), train.parts[0].left_out) == (4, 1)
    assert re.search(rf"1 of 5 .* line {place + 1}.* {reason}", caplog.text)
    rows = [number for number in range(5) if number != place]
    assert [train.row_of(index) for index in range(4)] == [(0, number) for number in rows]
    assert [train.index_of(0, number) for number in rows] == list(range(4))
    caplog.clear()
    assert load_with("drop", [damaged, *lines, *[damaged] * 4]).parts[0].left_out == 6
    names = [f"line {number}" for number in sorted({1, place + 2, 7, 8})[:3]]
    assert re.search("6 of 10 .*: .*" + ".*; .*".join(names) + ".*; and 3 more", caplog.text)
    for lines in ([damaged], [damaged] * 3):
        with pytest.raises(BatchError, match=reason) as caught:
            load_with("drop", lines)
        assert "unusable=drop" not in str(caught.value)


def test_mixed_samples_know_their_rows(tmp_path: Path, tokenizer: Any) -> None:
    paths = [write(tmp_path / f"{name}.jsonl", rows_of(8)) for name in "ab"]
    train = load(tokenizer, train=paths, eval_fraction=0.5).train
    places = [train.row_of(index) for index in range(len(train))]
    assert [train[index]["answer"] for index in range(len(train))] == [row for _, row in places]
    assert [train.index_of(*place) for place in places] == list(range(8))


# ---------------------------------------------------------------------- summary


def test_template_settings_need_chats(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": "1=", "answer": "1"}])
    with pytest.raises(ConfigError, match=r"template_args = .*: the data has texts"):
        load(tokenizer, DEMONSTRATIONS, train=path, template_args={"enable_thinking": False})


def test_summary_counts_examples_and_tokens(tmp_path: Path, tokenizer: Any) -> None:
    # And three tokens of each example.
    rows = [{"prompt": "1" * length, "answer": 1} for length in (2, 4, 6, 40)]
    paths = [write(tmp_path / "a.jsonl", rows), write(tmp_path / "b.jsonl", rows[:1])]
    data = load(tokenizer, DEMONSTRATIONS, train=paths, unusable="drop")
    line, preview = summarize_data(data, tokenizer, seed=0).lines()
    first, second = line.split("; ")
    assert first.endswith("a.jsonl: 3 examples (1 left out), 21 tokens")
    assert second.endswith("b.jsonl: 1 examples, 5 tokens")
    assert preview.startswith("first example: ") and "⟦" in preview
