"""The base of all configs, and the translation of pydantic's errors into ours."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from core_rl.config.secret import hidden
from core_rl.errors import ConfigError, raise_all

ConfigT = TypeVar("ConfigT", bound="Config")

WORDING: Mapping[str, str] = {
    "dict_type": "must be a mapping of names to values",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
    "string_type": "must be a text",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "finite_number": "must be finite",
    "literal_error": "must be {expected}",
}
"""Sentences for kinds of pydantic's errors."""
BRANCH = re.compile(r"(literal|tuple|list|dict)\[.*\]")
"""A part of an error's location that names a kind of value of the field before it."""
SHOWN_CHARACTERS = 80
"""The longest value that an error shows in full."""
NEARLY_SAME = 0.85
"""Likeness of a misspelled name, such as one without its plural, which is likelier than another section."""


class Config(BaseModel):
    """A frozen, keyword-only record that refuses unknown fields.

    ``Config(...)`` raises pydantic's ``ValidationError``; `parse_config` raises `ConfigError` with
    the field, the value and the fix, and is what reads files and command lines.
    """

    # pydantic's own messages would show the values of secrets.
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        hide_input_in_errors=True,
        allow_inf_nan=False,
    )
    other_names: ClassVar[Mapping[str, str]] = {}
    """Dotted fields by the names that other systems have for them; errors show these."""


def parse_config(kind: type[ConfigT], values: Mapping[str, Any], where: str = "config") -> ConfigT:
    """Build ``kind`` from plain values, or raise one `ConfigError` that lists every wrong field."""
    try:
        parsed = kind.model_validate(dict(values))
    except ValidationError as error:
        raise_all(ConfigError, where, list(_problems(kind, error.errors())))
        raise AssertionError("a validation error without details") from error
    raise_all(ConfigError, where, list(_numbers_by_truth(values, parsed)))
    return parsed


def _numbers_by_truth(values: Mapping[str, Any], parsed: Config, prefix: str = "") -> Iterator[str]:
    """A sentence for each true or false that became 1 or 0, as pydantic has it."""
    for name in (known for known in type(parsed).model_fields if known in values):
        value, number = values[name], getattr(parsed, name)
        if isinstance(value, Mapping) and isinstance(number, Config):
            yield from _numbers_by_truth(value, number, f"{prefix}{name}.")
        elif isinstance(value, bool) and isinstance(number, int | float) and not isinstance(number, bool):
            yield f"field '{prefix}{name}' = {value}: it is a number, neither true nor false"


def _problems(kind: type[BaseModel], details: Iterable[ErrorDetails]) -> Iterator[str]:
    """A sentence for each wrong value, with all kinds of values that its field may have."""
    for location, group in groupby(
        details, lambda one: [part for part in one["loc"] if not BRANCH.match(str(part))]
    ):
        first, *others = group
        kinds = [_message(kind, detail).removeprefix("must be ") for detail in others]
        yield " or ".join([_problem(kind, location, first), *kinds])


def _problem(kind: type[BaseModel], place: Sequence[int | str], detail: ErrorDetails) -> str:
    location = ".".join(map(str, place))
    value = hidden(str(place[-1]) if place else "", detail["input"])
    message = _message(kind, detail)
    if detail["type"] == "extra_forbidden":
        return f"unknown field {location!r}{_shown(value)}{_suggestion(kind, detail['loc'])}"
    if detail["type"] == "missing":
        return f"field {location!r} is required; set it"
    if not location:
        return message
    if isinstance(value, Mapping) and detail["type"] == "value_error":
        return f"section {location!r}: {message}"
    return f"field {location!r}{_shown(value)}: {message}"


def _message(kind: type[BaseModel], detail: ErrorDetails) -> str:
    if detail["type"] in ("model_type", "model_attributes_type"):
        section = _owner(kind, detail["loc"])
        fields = "" if section is None else f": {', '.join(sorted(section.model_fields))}"
        return f"must be a section with fields below it{fields}"
    if detail["type"] in WORDING:
        return WORDING[detail["type"]].format(**detail.get("ctx", {}))
    return detail["msg"].removeprefix("Value error, ")


def _shown(value: object) -> str:
    """`` = VALUE`` for a short value, nothing for a section or a list that fills lines."""
    text = repr(value)
    if len(text) <= SHOWN_CHARACTERS:
        return f" = {text}"
    return f" = {text[:SHOWN_CHARACTERS]}..." if isinstance(value, str) else ""


def _suggestion(kind: type[BaseModel], location: tuple[int | str, ...]) -> str:
    """The field that has the unknown name in another section or system, or the closest one and the list of all."""
    owner, name = _owner(kind, location[:-1]), str(location[-1])
    if owner is None:
        return "; remove it"
    known = sorted(owner.model_fields)
    misspelled = len(location) > 1 and difflib.get_close_matches(name, known, cutoff=NEARLY_SAME)
    # Not of the section that it stands in: other kinds of this section may have it.
    others = {part: field for part, field in kind.model_fields.items() if part != location[0]}
    sections = {f"{part}.{name}": _configs_in(field.annotation) for part, field in others.items()}
    places = [place for place, configs in sections.items() if any(name in c.model_fields for c in configs)]
    elsewhere = getattr(kind, "other_names", {}).get(name) or " or ".join(places)
    if elsewhere and not misspelled:
        return f"; its place here is {elsewhere}"
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else "; remove it."
    return f"{hint} Known fields: {', '.join(known)}"


def _owner(kind: type[BaseModel], location: tuple[int | str, ...]) -> type[BaseModel] | None:
    """The config class that ``location`` leads to, through plain nesting and sections chosen by ``type``."""
    nested: list[type[BaseModel]] = [kind]
    for part in location:
        if isinstance(part, int):
            continue  # an index of a list, whose items are all of one kind
        tagged = [c for c in nested if "type" in c.model_fields and c.model_fields["type"].default == part]
        if len(nested) > 1 and len(tagged) == 1:
            nested = tagged  # pydantic puts the tag into the location
            continue
        field = nested[0].model_fields.get(str(part)) if len(nested) == 1 else None
        if field is None:
            return None
        nested = list(_configs_in(field.annotation))
    return nested[0] if len(nested) == 1 else None


def _configs_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The config classes among the members of unions and the arguments of ``Annotated``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for member in getattr(annotation, "__args__", ()):
        yield from _configs_in(member)
