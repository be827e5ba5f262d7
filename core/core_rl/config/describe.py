"""Descriptions of the fields of a config class, for help texts and documentation."""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from core_rl.config.secret import SecretReference

_BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


@dataclass(frozen=True, kw_only=True)
class FieldHelp:
    """One field that a user can set."""

    name: str
    """Dotted, as in an override: ``optimizer.schedule.type``."""
    type: str
    """Such as ``int (>= 0)``, ``float | null`` or ``'lm' | 'value'``."""
    required: bool
    default: Any
    """None where ``required``; a config where the field is a section."""
    help: str
    """One line of plain text."""


def describe_fields(kind: type[BaseModel]) -> list[FieldHelp]:
    """Every field of ``kind``, sections before their own fields, in the order of declaration."""
    return list(_walk(kind, "", None))


def _walk(kind: type[BaseModel], prefix: str, defaults: BaseModel | None) -> Iterator[FieldHelp]:
    """``defaults`` is the section's own default, whose fields may differ from the defaults of its class."""
    for name, field in kind.model_fields.items():
        class_default = field.get_default(call_default_factory=True, validated_data={})
        default = class_default if defaults is None else getattr(defaults, name)
        section = _section(field.annotation)
        if section is None or default is PydanticUndefined or type(None) in _parts(field.annotation):
            bounds = [
                f"{sign} {bound}"
                for constraint in field.metadata
                for key, sign in _BOUNDS.items()
                if (bound := getattr(constraint, key, None)) is not None
            ]
            yield FieldHelp(
                name=prefix + name,
                type=_type_name(field.annotation) + (f" ({', '.join(bounds)})" if bounds else ""),
                required=default is PydanticUndefined,
                default=None if default is PydanticUndefined else default,
                help=" ".join((field.description or "").replace("`", "").split()),
            )
        if section is not None:
            yield from _walk(section, f"{prefix}{name}.", default if isinstance(default, section) else None)


def _section(annotation: Any) -> type[BaseModel] | None:
    """The config class of a field that is one section, or one section or null."""
    sections = [part for part in _parts(annotation) if isinstance(part, type) and issubclass(part, BaseModel)]
    return sections[0] if len(sections) == 1 else None


def _parts(annotation: Any) -> tuple[Any, ...]:
    union = get_origin(annotation) in (Union, types.UnionType)
    return get_args(annotation) if union else (annotation,)


def _type_name(annotation: Any) -> str:
    parts = _parts(annotation)
    if len(parts) > 1:
        return " | ".join(_type_name(part) for part in parts)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type_name(arguments[0])
    if origin is Literal:
        return " | ".join(repr(argument) for argument in arguments)
    if origin in (list, tuple):
        names = [_type_name(argument) for argument in arguments if argument is not ...]
        return f"list of {names[0]}" if origin is list or ... in arguments else f"[{', '.join(names)}]"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    plain = {
        type(None): "null",
        SecretReference: "'${env:NAME}'",
        dict: "mapping",
        list: "list",
        tuple: "list",
        Any: "anything",
    }
    kind = origin or annotation
    return plain.get(kind, getattr(kind, "__name__", str(kind)))
