"""YAML files and dotted overrides."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from core_rl.config.loading import apply_overrides, load_yaml, parse_overrides
from core_rl.errors import ConfigError

SCALARS: list[tuple[str, Any]] = [
    ("1e-5", 1e-5),
    ("1E5", 1e5),
    ("-2.5e+3", -2500.0),
    (".5", 0.5),
    ("5.", 5.0),
    (".inf", math.inf),
    ("-.INF", -math.inf),
    ("3", 3),
    ("-3", -3),
    ("010", 10),
    ("08", 8),
    ("0x1F", 31),
    ("0o17", 15),
    ("1_000_000", 1_000_000),
    ("1__0", "1__0"),
    ("true", True),
    ("False", False),
    ("no", "no"),
    ("on", "on"),
    ("null", None),
    ("~", None),
    ("2024-01-01", "2024-01-01"),
    ("2024-99-99", "2024-99-99"),
    ("1:30", "1:30"),
    ("'3'", "3"),
    ("fsdp", "fsdp"),
    ("[1, 2e-1, x]", [1, 0.2, "x"]),
    ("{a: 1e-3}", {"a": 1e-3}),
]


@pytest.mark.parametrize(("text", "value"), SCALARS)
def test_scalars_read_alike_in_files_and_overrides(tmp_path: Path, text: str, value: object) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(f"x: {text}\n", encoding="utf-8")
    found = load_yaml(file)["x"]
    assert (found, type(found)) == (value, type(value))
    assert parse_overrides([f"x={text}"]) == [(("x",), value)]


def test_nan_is_a_number() -> None:
    assert math.isnan(parse_overrides(["x=.nan"])[0][1])


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_float_survives_python_s_own_notation(value: float) -> None:
    assert parse_overrides([f"x={value!r}"]) == [(("x",), value)]


def test_pyyaml_itself_is_left_alone() -> None:
    assert yaml.safe_load("x: no") == {"x": False}
    assert yaml.safe_load("x: 1e-5") == {"x": "1e-5"}


def test_an_empty_file_is_an_empty_mapping(tmp_path: Path) -> None:
    file = tmp_path / "empty.yaml"
    file.write_text("# nothing yet\n", encoding="utf-8")
    assert load_yaml(file) == {}


def test_merge_keys_may_be_overridden(tmp_path: Path) -> None:
    file = tmp_path / "merge.yaml"
    file.write_text("base: &b {lr: 1, eps: 2}\nactor: {<<: *b, lr: 3}\n", encoding="utf-8")
    assert load_yaml(file)["actor"] == {"lr": 3, "eps": 2}


BAD_FILES = [
    (b"a: 1\nb: [1, 2\nc: 3\n", "bad.yaml:3:"),
    (b"a: 1\na: 2\n", "bad.yaml:2:1: key 'a' occurs twice; it stands in line 1 already"),
    (b"a:\n  b: 1\n  c: 2\n  b: 3\n", "bad.yaml:4:3: key 'b' occurs twice; it stands in line 2"),
    (b"a: !!python/object/apply:os.system [ls]\n", "bad.yaml:1:4: could not determine a constructor"),
    (b"a: *nowhere\n", "bad.yaml:1:4: found undefined alias"),
    (b"a:\n\t- 1\n", "bad.yaml:2:1"),
    (b"- 1\n- 2\n", "expected 'key: value' lines at the top level, found a list"),
    (b"hello\n", "found a text"),
    (b"1: x\n", "must be strings, found [1]"),
    (b"? [a, b]\n: x\n", "bad.yaml:1:3: found unhashable key"),
    (b"a: !!int x\n", "invalid literal for int"),
    (b"a: \xff\n", "is not UTF-8 text"),
    (b"a: \x01\n", "special characters are not allowed"),
]


@pytest.mark.parametrize(("content", "message"), BAD_FILES)
def test_a_bad_file_is_named_with_its_line(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_yaml(file)
    assert str(file) in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize(("name", "message"), [("none.yaml", "No such file"), (".", "Is a directory")])
def test_an_unreadable_path_is_named(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_yaml(tmp_path / name)


VALUES: dict[str, Any] = {"engine": "reference", "a": {"b": 1}, "list": [{"w": 1}, {"w": 2}], "none": None}

OVERRIDES: list[tuple[list[str], dict[str, Any]]] = [
    (["engine=fsdp"], {"engine": "fsdp"}),
    (["a.b=3"], {"a": {"b": 3}}),
    (["a.c.d=x"], {"a": {"b": 1, "c": {"d": "x"}}}),
    (["new.deep.er=1e-5"], {"new": {"deep": {"er": 1e-5}}}),
    (["none.b=1"], {"none": {"b": 1}}),
    (["a=null"], {"a": None}),
    (["a=null", "a.b=2"], {"a": {"b": 2}}),
    (["a.b=2", "a.b=4"], {"a": {"b": 4}}),
    (["list.1.w=5"], {"list": [{"w": 1}, {"w": 5}]}),
    (["list.0=7"], {"list": [7, {"w": 2}]}),
    (["engine=a=b"], {"engine": "a=b"}),
    (["engine=''"], {"engine": ""}),
    (["a.1=x"], {"a": {"b": 1, "1": "x"}}),
]


@pytest.mark.parametrize(("overrides", "changes"), OVERRIDES)
def test_overrides(overrides: list[str], changes: dict[str, Any]) -> None:
    assert apply_overrides(VALUES, overrides) == VALUES | changes


def test_overrides_leave_the_original_alone() -> None:
    values: dict[str, Any] = {"a": {"b": [1]}}
    apply_overrides(values, ["a.b.0=2", "a.c=3"])
    assert values == {"a": {"b": [1]}}


BAD_OVERRIDES = [
    ("engine", "'engine' is not of the form 'section.field=value'"),
    ("=3", "not of the form"),
    ("a..b=3", "not of the form"),
    (".a=3", "not of the form"),
    ("a b=3", "not of the form"),
    ("--lr=3", "'--lr=3' is not of the form"),
    ("a.b=", "has no value; write a.b=null"),
    ("a.b=[1", "'a.b=[1'"),
    ("engine.name=x", "'engine' is 'reference', which has no field 'name'"),
    ("a.b.c=x", "'a.b' is 1, which has no field 'c'"),
    ("list.2.w=x", "'list' is a list of 2; '2' must be an index from 0 to 1"),
    ("list.w=x", "'w' must be an index"),
    ("list.-1=x", "not of the form"),
]


@pytest.mark.parametrize(("override", "message"), BAD_OVERRIDES)
def test_bad_overrides(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        apply_overrides(VALUES, [override])
    assert message in str(caught.value)


def test_all_malformed_overrides_come_at_once() -> None:
    with pytest.raises(ConfigError, match="2 problems"):
        parse_overrides(["a", "b=1", "c=[1"])
