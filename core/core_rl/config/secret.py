"""Secrets in configs: the name of an environment variable, never the value."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from core_rl.errors import ConfigError

HIDDEN = "***"
"""The text that stands for a secret in messages."""
HOW = (
    "a secret in a recipe or config would be written to the run's files and pages; put it into an environment "
    "variable, and write '${env:NAME}' with its name"
)
_REFERENCE = re.compile(r"\$\{env:([A-Za-z_]\w*)\}", re.ASCII)
_SECRET_FIELD = re.compile(
    r"(.*[_-])?(api[_-]?keys?|passwords?|secrets?|(access|auth|hf)[_-]?tokens?|credentials?)", re.IGNORECASE
)


@dataclass(frozen=True)
class SecretReference:
    """A secret in the environment variable ``name``; a config writes ``${env:NAME}``.

    Files, pages, messages and other processes see the reference alone.
    """

    name: str

    def __str__(self) -> str:
        return f"${{env:{self.name}}}"

    def read(self) -> str:
        """The secret; raises `ConfigError` where the variable is not set."""
        value = os.environ.get(self.name)
        if not value:
            raise ConfigError(
                f"{self}: the environment variable {self.name} is not set here; export it before the start"
            )
        return value

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls._parse, serialization=core_schema.to_string_ser_schema(when_used="always")
        )

    @classmethod
    def _parse(cls, value: object) -> SecretReference:
        if isinstance(value, cls):
            return value
        match = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
        if match is None:
            raise ValueError(HOW)
        return cls(match[1])


def unset_references(values: Mapping[str, Any]) -> list[str]:
    """A sentence for each ``${env:NAME}`` in ``values``, at any depth, whose variable is not set."""
    return [
        f"field {path!r} = {value!r}: the environment variable {name} is not set; export it before the start"
        for path, _, value in leaves(values)
        if (name := _name_of(value)) is not None and not os.environ.get(name)
    ]


def _name_of(value: object) -> str | None:
    """The variable that ``value`` refers to; None for other values."""
    if isinstance(value, SecretReference):
        return value.name
    match = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
    return None if match is None else match[1]


def leaves(value: Any, path: str = "", name: str = "") -> Iterator[tuple[str, str, Any]]:
    """Dotted path, field and value of all below ``value`` that is no mapping or list; a list's field is its items'."""
    if isinstance(value, Mapping | list | tuple):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            field = str(key) if isinstance(value, Mapping) else name
            yield from leaves(item, f"{path}.{key}" if path else str(key), field)
    else:
        yield path, name, value


def literal_secrets(values: Mapping[str, Any]) -> list[str]:
    """A sentence for each field of ``values``, at any depth, that holds a secret itself."""
    return [
        f"field {path!r} = {HIDDEN}: {HOW}"
        for path, name, value in leaves(values)
        if _is_literal(name, value)
    ]


def hidden(name: str, value: Any) -> Any:
    """``value`` of the field ``name``, with `HIDDEN` for each secret in it."""
    if isinstance(value, Mapping):
        return {key: hidden(str(key), item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [hidden(name, item) for item in value]
    return HIDDEN if _is_literal(name, value) else value


def _is_literal(name: str, value: Any) -> bool:
    """Whether ``value`` is a secret by the ``name`` of its field, and no reference."""
    if value is None or isinstance(value, bool | SecretReference):
        return False
    return bool(_SECRET_FIELD.fullmatch(name)) and not _REFERENCE.fullmatch(str(value))
