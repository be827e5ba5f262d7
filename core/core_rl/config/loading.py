"""Plain values from YAML files and from dotted overrides such as ``optimizer.lr=1e-5``.

Scalars follow YAML 1.2's core schema, as JSON users expect: ``1e-5`` is a number, ``no`` and
``2024-01-01`` are strings, ``010`` is ten. PyYAML alone reads YAML 1.1, where none of this holds.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from core_rl.config.secret import hidden
from core_rl.errors import ConfigError, raise_all

Override: TypeAlias = tuple[tuple[str, ...], Any]
"""A path of keys, and the value to set there."""

_PATH = re.compile(r"\w[\w-]*(\.\w[\w-]*)*", re.ASCII)


class _Loader(yaml.SafeLoader):
    """Safe YAML with the scalars of YAML 1.2, which refuses a key that occurs twice."""

    # A class of its own resolvers: SafeLoader's are shared by every user of PyYAML in the process.
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012  (PyYAML's own annotation)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[Any, int] = {}
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge" or not isinstance(key_node, yaml.ScalarNode):
                continue
            key, mark = self.construct_object(key_node), key_node.start_mark
            if key in lines:
                problem = f"key {key!r} occurs twice; it stands in line {lines[key]} already"
                raise yaml.constructor.ConstructorError(None, None, problem, mark)
            lines[key] = mark.line + 1
        return super().construct_mapping(node, deep)

    def construct_number(self, node: yaml.ScalarNode) -> int:
        text = self.construct_scalar(node)
        return int(text, 0) if text[:2] in ("0o", "0x") else int(text)

    def construct_real(self, node: yaml.ScalarNode) -> float:
        return float(self.construct_scalar(node).lower().replace(".inf", "inf").replace(".nan", "nan"))


# For each tag the pattern of its scalars, and the characters that they begin with.
_SCALARS = {
    "bool": (r"true|True|TRUE|false|False|FALSE", [*"tTfF"]),
    "int": (r"[-+]?[0-9]+(_[0-9]+)*|0o[0-7]+|0x[0-9a-fA-F]+", [*"-+0123456789"]),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        [*"-+.0123456789"],
    ),
    "null": (r"~|null|Null|NULL|", [*"~nN", ""]),
    "merge": (r"<<", ["<"]),
}
for _tag, (_pattern, _first) in _SCALARS.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first)
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_number)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_real)


def load_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file, or an empty one if the file is empty.

    Raises:
        ConfigError: with the file and, where the text is at fault, the line and column.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text: {error.reason} at byte {error.start}") from error
    values = _parse(text, str(path))
    if values is None:
        return {}
    if not isinstance(values, dict):
        kind = {list: "list", str: "text", bool: "truth value"}.get(type(values), type(values).__name__)
        raise ConfigError(f"{path}: expected 'key: value' lines at the top level, found a {kind}")
    if wrong := [key for key in values if not isinstance(key, str)]:
        raise ConfigError(f"{path}: the keys at the top level must be strings, found {wrong!r}; quote them")
    return values


def _parse(text: str, where: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        position = f"{where}:{mark.line + 1}:{mark.column + 1}" if mark else where
        context = f" {error.context}" if error.context else ""
        raise ConfigError(f"{position}: {error.problem}{context}") from error
    except (yaml.YAMLError, ValueError) as error:  # a forbidden character, or "!!int x": no line is known
        raise ConfigError(f"{where}: {' '.join(str(error).split())}") from error


def parse_overrides(overrides: Iterable[str]) -> list[Override]:
    """Split ``"a.b=3"`` into ``(("a", "b"), 3)``; the value is read as YAML.

    Raises:
        ConfigError: with every malformed override.
    """
    parsed: list[Override] = []
    problems: list[str] = []
    for override in overrides:
        path, equals, text = override.partition("=")
        if not equals or not _PATH.fullmatch(path):
            problems.append(f"{override!r} is not of the form 'section.field=value'")
        elif not text.strip():
            problems.append(f"{override!r} has no value; write {path}=null or {path}='\"\"'")
        else:
            try:
                parsed.append((tuple(path.split(".")), _parse(text, repr(override))))
            except ConfigError as error:
                problems.append(str(error))
    raise_all(ConfigError, "overrides", problems)
    return parsed


def apply_overrides(values: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """A copy of ``values`` with ``overrides`` applied in order; sections that are missing are made.

    A number in a path indexes an existing list (``rewards.0.weight=2``); lists never grow.

    Raises:
        ConfigError: a malformed override, an index outside its list, or a path through a plain value.
    """
    result = copy.deepcopy(dict(values))
    for path, value in parse_overrides(overrides):
        section: Any = result
        for depth, key in enumerate(path[:-1], start=1):
            slot = _slot(section, path, depth - 1)
            child = section.get(slot) if isinstance(section, dict) else section[slot]
            if child is None:
                child = section[slot] = {}
            if not isinstance(child, dict | list):
                raise ConfigError(
                    f"override {'.'.join(path)!r}: {'.'.join(path[:depth])!r} is {hidden(key, child)!r}, which has no "
                    f"field {path[depth]!r}; override {key!r} itself"
                )
            section = child
        section[_slot(section, path, len(path) - 1)] = value
    return result


def _slot(section: dict[str, Any] | list[Any], path: tuple[str, ...], depth: int) -> Any:
    """The key ``path[depth]`` of ``section``: itself in a dictionary, a checked index in a list."""
    key = path[depth]
    if isinstance(section, dict):
        return key
    if key.isdecimal() and int(key) < len(section):
        return int(key)
    raise ConfigError(
        f"override {'.'.join(path)!r}: {'.'.join(path[:depth])!r} is a list of {len(section)}; "
        f"{key!r} must be an index from 0 to {len(section) - 1}"
        + ("; override the whole list" if not section else "")
    )
