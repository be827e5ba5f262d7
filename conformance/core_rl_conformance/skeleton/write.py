"""Writing the skeleton of an engine's distribution from the templates."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Self

from core_rl import __version__
from core_rl.errors import ConfigError, raise_all
from core_rl.registry.engines import list_engines
from core_rl.registry.spec import PROTOCOL_VERSION

__all__ = ["Skeleton", "write_skeleton"]

TEMPLATES = Path(__file__).parent / "templates"
FILES = {
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    "src/$module/__init__.py": "init.py",
    "src/$module/config.py": "config.py",
    "src/$module/engine.py": "engine.py",
    "src/$module/conformance.py": "conformance.py",
    "src/$module/py.typed": None,
    "tests/test_${stem}_engine.py": "test_engine.py",
}
"""Each file of a distribution with its template; an empty one has none."""
NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
CLASS_PREFIX = re.compile(r"[A-Z][A-Za-z0-9]*")
DISTRIBUTION_PREFIX = "core-rl-"
RESERVED = ("conformance", "oracle", "trainer", "fsdp", "megatron", "sglang", "torchtitan", "vllm")
"""Names whose distributions, or modules, are core-rl's own, installed or not."""


@dataclass(frozen=True, kw_only=True)
class Skeleton:
    """The names in a new engine's distribution."""

    name: str
    class_prefix: str

    @classmethod
    def named(cls, name: str, class_prefix: str | None = None) -> Self:
        """The names that follow from the engine's; ``class_prefix`` is the name in CapWords by default.

        Raises `ConfigError` that lists everything that is wrong with them.
        """
        skeleton = cls(
            name=name, class_prefix=class_prefix or "".join(part.capitalize() for part in name.split("-"))
        )
        raise_all(ConfigError, f"no engine can be called {name!r}", skeleton._violations())
        return skeleton

    def _violations(self) -> Iterator[str]:
        if not NAME.fullmatch(self.name):
            yield "use lower-case letters, digits and single hyphens, and begin with a letter, such as 'my-engine'"
            return
        if self.name.startswith(DISTRIBUTION_PREFIX):
            short = self.name.removeprefix(DISTRIBUTION_PREFIX)
            yield f"give the engine's name, and not its distribution's: {short!r}"
        taken = [entry for entry in list_engines() if entry.name == self.name]
        if taken:
            yield f"{taken[0].distribution} {taken[0].version} has one of this name; choose another, or uninstall it"
        elif self.name in RESERVED or find_spec(self.module) is not None:
            yield f"the module {self.module} is core-rl's own, or installed already; choose another name"
        if not CLASS_PREFIX.fullmatch(self.class_prefix):
            yield f"the class prefix {self.class_prefix!r} must be CapWords, such as 'MyEngine'"

    @property
    def distribution(self) -> str:
        """The distribution's name."""
        return DISTRIBUTION_PREFIX + self.name

    @property
    def module(self) -> str:
        """The name of its package."""
        return f"core_rl_{self.name.replace('-', '_')}"

    def files(self) -> dict[str, str]:
        """The text of each file by its path in the distribution."""
        stem = self.name.replace("-", "_")
        names = {
            "name": self.name,
            "distribution": self.distribution,
            "module": self.module,
            "stem": stem,
            "prefix": self.class_prefix,
            "protocol": str(PROTOCOL_VERSION),
            "core_range": _core_range(),
        }
        return {
            Template(path).substitute(names): Template(_template(source)).substitute(names)
            for path, source in FILES.items()
        }


def _core_range() -> str:
    """This core and its later patches, as a requirement writes it."""
    major, minor = map(int, __version__.split(".")[:2])
    return f">={major}.{minor},<{major}.{minor + 1}"


def _template(name: str | None) -> str:
    return (TEMPLATES / f"{name}.tmpl").read_text(encoding="utf-8") if name else ""


def write_skeleton(skeleton: Skeleton, directory: Path) -> list[Path]:
    """Write all files below ``directory``, and return their paths.

    Raises `ConfigError` if any of them exists, before anything is written, or if one cannot be written.
    """
    files = {directory / path: text for path, text in skeleton.files().items()}
    existing = [f"{path} exists" for path in files if path.exists()]
    raise_all(ConfigError, f"nothing is overwritten in {directory}; choose another --directory", existing)
    for path, text in files.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be written: {error.strerror}; choose another --directory"
            ) from error
    return list(files)
