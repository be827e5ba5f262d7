"""The skeleton of an engine's distribution that ``core-rl new-engine`` writes: an example engine, renamed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Self

from core_rl.errors import ConfigError, raise_all
from core_rl.registry.engines import list_engines
from core_rl.registry.spec import EngineKind

PACKAGE = Path(__file__).parent
PLACES = (PACKAGE / "examples", PACKAGE.parents[1] / "examples")
"""Directory of the example engines, in a wheel and in the checkout."""
EXAMPLES: Mapping[EngineKind, tuple[str, str]] = {"train": ("ddp", "DDP"), "inference": ("plain", "Plain")}
"""Name and class prefix of the example of each kind."""
PATTERNS = ("*.toml", "*.md", "src/*/*.py", "src/*/py.typed", "tests/*.py")
"""Of an example's files; others are caches."""
NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
CLASS_PREFIX = re.compile(r"[A-Z][A-Za-z0-9]*")
DISTRIBUTION_PREFIX = "core-rl-"
RESERVED = (
    *("conformance", "oracle", "trainer"),
    *("fsdp", "megatron", "mindspore", "sglang", "torchtitan", "vllm"),
)
"""Names whose distributions, or modules, are core-rl's own, installed or not."""


@dataclass(frozen=True, kw_only=True)
class Skeleton:
    """The names in a new engine's distribution."""

    name: str
    class_prefix: str
    kind: EngineKind

    @classmethod
    def named(cls, name: str, class_prefix: str | None = None, kind: EngineKind = "train") -> Self:
        """The names that follow from the engine's; ``class_prefix`` is the name in CapWords by default.

        Raises `ConfigError` that lists everything that is wrong with them.
        """
        skeleton = cls(
            name=name,
            class_prefix=class_prefix or "".join(part.capitalize() for part in name.split("-")),
            kind=kind,
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
        return DISTRIBUTION_PREFIX + self.name

    @property
    def module(self) -> str:
        return f"core_rl_{self.name.replace('-', '_')}"

    def files(self) -> dict[str, str]:
        """The text of each file by its path in the distribution."""
        of_example, prefix = EXAMPLES[self.kind]
        names = {
            f"core-rl-{of_example}": self.distribution,
            f"core_rl_{of_example}": self.module,
            f"CORE_RL_{of_example.upper()}": self.module.upper(),
            f"test_{of_example}": f"test_{self.name.replace('-', '_')}",
            prefix: self.class_prefix,
            of_example: self.name,
        }
        pattern = re.compile("|".join(names))

        def renamed(text: str) -> str:
            return pattern.sub(lambda match: names[match[0]], text)

        example = next(place for place in PLACES if place.is_dir()) / f"core-rl-{of_example}"
        paths = [path for pattern in PATTERNS for path in sorted(example.glob(pattern))]
        return {
            renamed(str(path.relative_to(example))): renamed(path.read_text(encoding="utf-8"))
            for path in paths
        }


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
