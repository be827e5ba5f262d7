"""Messages of configs for values of another kind, in words of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import pytest
from pydantic import Field

from core_rl.config.base import Config, parse_config
from core_rl.config.paths import ImportPath
from core_rl.errors import ConfigError


class Part(Config):
    size: int = Field(default=1, ge=1, lt=9)
    share: float = Field(default=0.5, gt=0.0, le=1.0)


class Whole(Config):
    part: Part = Part()
    other: Part | None = None
    names: tuple[str, ...] = ()
    values: dict[str, int] = Field(default_factory=dict)
    fresh: bool = False
    mode: Literal["min", "max"] = "min"
    layers: Literal["all"] | tuple[int, ...] = "all"
    code: ImportPath = "a:b"

    other_names: ClassVar[Mapping[str, str]] = {"learning_rate": "part.size", "shares": "names"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"part": 3}, "field 'part' = 3: must be a section with fields below it: share, size"),
        ({"other": [1]}, "field 'other' = [1]: must be a section with fields below it: share, size"),
        ({"names": "x"}, "field 'names' = 'x': must be a list"),
        ({"names": [3]}, "field 'names.0' = 3: must be a text"),
        ({"values": [1]}, "field 'values' = [1]: must be a mapping of names to values"),
        ({"values": {"a": 0.5}}, "field 'values.a' = 0.5: must be a whole number"),
        ({"fresh": "maybe"}, "field 'fresh' = 'maybe': must be true or false"),
        ({"mode": "mean"}, "field 'mode' = 'mean': must be 'min' or 'max'"),
        ({"layers": "1,2"}, "field 'layers' = '1,2': must be 'all' or a list"),
        ({"part": {"size": "many"}}, "field 'part.size' = 'many': must be a whole number"),
        ({"part": {"size": 0}}, "field 'part.size' = 0: must be at least 1"),
        ({"part": {"size": 9}}, "field 'part.size' = 9: must be below 9"),
        ({"part": {"share": 0}}, "field 'part.share' = 0: must be above 0.0"),
        ({"part": {"share": 2}}, "field 'part.share' = 2: must be at most 1.0"),
        ({"part": {"share": "half"}}, "field 'part.share' = 'half': must be a number"),
        ({"part": {"share": float("inf")}}, "field 'part.share' = inf: must be finite"),
        ({"share": 1}, "unknown field 'share' = 1; its place here is part.share or other.share"),
        ({"part": {"mode": 1}}, "unknown field 'part.mode' = 1; remove it. Known fields: share, size"),
        (
            {"part": {"shares": 1}},
            "unknown field 'part.shares' = 1; did you mean 'share'? Known fields: share, size",
        ),
        ({"learning_rate": 1}, "unknown field 'learning_rate' = 1; its place here is part.size"),
        (
            {"code": print},
            "field 'code' = <built-in function print>: is an object; write its name, builtins:print",
        ),
    ],
)
def test_wrong_kinds_of_values_are_described(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_config(Whole, values, "recipe")
    assert str(raised.value) == f"recipe: {message}"
