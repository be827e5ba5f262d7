"""The help of config fields."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from pydantic import Field

from core_rl.config.base import Config
from core_rl.config.describe import FieldHelp, describe_fields
from core_rl.config.engine import InferenceEngineConfig, TrainEngineConfig


class _Inner(Config):
    size: int = Field(default=2, ge=1, le=8)
    """How `large`."""


class _Outer(Config):
    needed: str
    """Must be
    given."""
    inner: _Inner = _Inner(size=5)
    """A section."""
    maybe: _Inner | None = None
    """A section or nothing."""
    required: _Inner
    """A section that must be given."""
    choice: Literal["a", "b"] = "a"
    """One of two."""
    pair: tuple[float, float] = (0.5, 1.0)
    """Two."""
    many: tuple[str, ...] = ()
    """Any number."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Free."""
    limit: float | None = Field(default=None, gt=0.0)
    """Above."""


EXPECTED: list[tuple[str, str, bool, Any]] = [
    ("needed", "str", True, None),
    ("inner.size", "int (>= 1, <= 8)", False, 5),
    ("maybe", "section | null", False, None),
    ("maybe.size", "int (>= 1, <= 8)", False, 2),
    ("required", "section", True, None),
    ("required.size", "int (>= 1, <= 8)", False, 2),
    ("choice", "'a' | 'b'", False, "a"),
    ("pair", "[float, float]", False, (0.5, 1.0)),
    ("many", "list of str", False, ()),
    ("extra", "mapping", False, {}),
    ("limit", "float | null (> 0.0)", False, None),
]


def test_every_field_is_described_under_its_dotted_name() -> None:
    fields = describe_fields(_Outer)
    assert [(f.name, f.type, f.required, f.default) for f in fields] == EXPECTED


def test_help_is_a_plain_line() -> None:
    helps = {field.name: field.help for field in describe_fields(_Outer)}
    assert (helps["needed"], helps["inner.size"]) == ("Must be given.", "How large.")


@pytest.mark.parametrize("kind", [TrainEngineConfig, InferenceEngineConfig])
def test_every_common_field_has_a_help(kind: type[Config]) -> None:
    silent: list[FieldHelp] = [field for field in describe_fields(kind) if not field.help]
    assert silent == []
