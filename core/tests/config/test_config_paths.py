"""Texts of configs that name files: made absolute where a config is read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core_rl.config.base import Config
from core_rl.config.describe import describe_fields
from core_rl.config.paths import HubPath, ImportPath, LocalPath, NestedImportPaths, ProgramPath


class Places(Config):
    """Every kind of a field that names a file."""

    file: LocalPath | None = None
    model: HubPath | None = None
    functions: tuple[ImportPath, ...] = ()
    settings: NestedImportPaths | None = None
    program: ProgramPath | None = None


PARTS = st.lists(st.sampled_from(["a", "b.c", "..", "ü ß", "x.py", "~"]), min_size=1, max_size=4)


@given(parts=PARTS, start=st.sampled_from(["", "/", "./", "~/"]))
def test_paths_mean_the_same_from_anywhere(parts: list[str], start: str) -> None:
    text = start + "/".join(parts)
    path = Places(file=text).file
    assert path is not None and Path(path).is_absolute()
    expected = os.path.abspath(os.path.expanduser(text))  # noqa: PTH100, PTH111
    assert os.path.normpath(path) == expected
    assert Places(file=path).file == path
    [reference] = Places(functions=(f"{text}.py:f",)).functions
    assert Path(reference).is_absolute() and reference.endswith(".py:f")
    settings = {"loss": {"type": f"{text}.py:f", "n": 1}, "names": [f"{text}.py:f", "module:f", "~/x"]}
    nested = Places(settings=settings).settings
    assert nested == {"loss": {"type": reference, "n": 1}, "names": [reference, "module:f", "~/x"]}
    program = Places(program=text).program
    assert program == (path if "/" in text else text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/name", "org/name"),
        ("org/name@main", "org/name@main"),
        ("here/model", "{cwd}/here/model"),
        ("./org/name", "{cwd}/org/name"),
        ("here", "{cwd}/here"),
        ("a/b/c", "{cwd}/a/b/c"),
        ("~/m", "{cwd}/home/m"),
        ("$HOME/m", "{cwd}/home/m"),
        ("~nobody-here/m", "{cwd}/~nobody-here/m"),
        ("s3://bucket/x", "s3://bucket/x"),
        ("", ""),
    ],
)
def test_hub_ids_stay_unless_they_are_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, expected: str
) -> None:
    (tmp_path / "here/model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert Places(model=text).model == expected.format(cwd=tmp_path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("package.module:function", "package.module:function"),
        ("grpo", "grpo"),
        ("http://host:1/score", "http://host:1/score"),
        ("http://host/a.py:f", "http://host/a.py:f"),
        ("rewards.py:f", "{cwd}/rewards.py:f"),
        ("sub/rewards.py:Class.f", "{cwd}/sub/rewards.py:Class.f"),
        ("/abs/rewards.py:f", "/abs/rewards.py:f"),
    ],
)
def test_files_of_functions_are_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert Places(functions=(text,)).functions == (expected.format(cwd=tmp_path),)


def test_paths_are_described_as_texts() -> None:
    types = {field.name: field.type for field in describe_fields(Places)}
    assert types == {
        "file": "str | null",
        "model": "str | null",
        "functions": "list of str",
        "settings": "mapping | null",
        "program": "str | null",
    }
