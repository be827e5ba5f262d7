"""The documentation: links lead somewhere, nothing is left to fill in, every public name has an entry."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import shlex
import tomllib
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from page_blocks import DOCS, FENCE, PAGES, ROOT, blocks_of, commands_of, name_of

from core_rl.config.base import parse_config
from core_rl.toolkit.attention import head_size
from core_rl_conformance.inputs.tiny_models import TinyModel
from core_rl_trainer.recipe.recipe import Recipe

PATTERNS = (
    "*.md",
    "docs/**/*.md",
    "benchmarks/*.md",
    "changelog.d/README.md",
    "plugins/*/*.md",
    "trainer/*.md",
    "cluster/*.md",
)
ALL_PAGES = sorted(page for pattern in (*PATTERNS, "examples/**/*.md") for page in ROOT.glob(pattern))
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
DIRECTIVE = re.compile(r"^::: ([\w.]+)\n((?:    .*\n)*)", re.MULTILINE)
# Blocks that no CPU test runs, by the reason in the comment above them.
NOT_RUN = {
    "needs a run of another page": 2,
    "installs packages": 7,
    "installs everything and trains for minutes": 1,
    "installs packages and trains for minutes": 1,
    "trains for a minute": 5,
    "needs an SGLang environment": 3,
    "needs a server": 1,
    "needs MindSpore": 1,
    "needs reports": 2,
    "downloads a processor": 1,
    "takes minutes": 11,
    "needs a run": 1,
    "two machines": 1,
    "needs a cluster": 3,
    "needs eight ranks": 1,
}
PUBLIC_PACKAGES = ["core_rl_trainer", "core_rl_trainer.algorithms"]
# Every public name of these modules has an entry as well.
PUBLIC_MODULES = [
    "core_rl.backend.inference_backend",
    "core_rl.backend.inference_protocols",
    "core_rl.backend.protocols",
    "core_rl.backend.tensors",
    "core_rl.backend.train_backend",
    "core_rl.errors",
    "core_rl.rollout.workflow",
    "core_rl_conformance.profile",
]


def ids(page: Path) -> str:
    return name_of(page)


def anchors(page: Path) -> set[str]:
    """Anchors that GitHub gives to the headings of a page."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ +(.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> Iterator[str]:
    for link in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            yield link


def documented() -> set[str]:
    """Dotted names that the reference pages document: of a module, the names of its ``__all__``."""
    found: set[str] = set()
    for page in DOCS.glob("**/*.md"):
        for name, _ in DIRECTIVE.findall(page.read_text(encoding="utf-8") + "\n"):
            found |= set(expand(name))
    return found


def expand(name: str) -> Iterator[str]:
    """``name``, and of a module its public names."""
    yield name
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError:
        owner, _, attribute = name.rpartition(".")
        getattr(importlib.import_module(owner), attribute)  # raises for a name that is gone
        return
    yield from (f"{name}.{attribute}" for attribute in getattr(module, "__all__", vars(module)))


def is_documented(package: str, name: str, entries: set[str]) -> bool:
    """Whether a public name of ``package`` has an entry under the module that defines it."""
    found = getattr(importlib.import_module(package), name)
    if isinstance(found, type) or inspect.isfunction(found):
        return f"{found.__module__}.{name}" in entries
    return any(entry.endswith(f".{name}") for entry in entries)  # constants and type aliases


@pytest.mark.parametrize("page", ALL_PAGES, ids=ids)
def test_links_lead_somewhere(page: Path) -> None:
    assert list(broken_links(page)) == []


@pytest.mark.parametrize("page", ALL_PAGES, ids=ids)
def test_nothing_is_left_to_fill_in(page: Path) -> None:
    assert re.findall(r"@[A-Z]+@|TODO|FIXME", page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("page", ALL_PAGES, ids=ids)
def test_code_parses(page: Path) -> None:
    for block in blocks_of(page):
        if block.language == "python":
            ast.parse(block.code)
        elif block.language in ("yaml", "toml"):
            assert block.language == "toml" or yaml.safe_load(block.code) is not None


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_parts_of_recipes_are_valid(page: Path) -> None:
    """Every YAML block without a title is a part of a recipe."""
    base = yaml.safe_load((ROOT / "examples" / "grpo_arithmetic.yaml").read_text(encoding="utf-8"))
    for block in blocks_of(page):
        if block.language == "yaml" and block.title is None:
            parse_config(Recipe, {**base, **yaml.safe_load(block.code)}, f"{name_of(page)}:{block.line}")


def test_every_public_name_has_an_entry() -> None:
    entries = documented()
    public = [
        (package, name)
        for package in ["core_rl", *PUBLIC_PACKAGES, *PUBLIC_MODULES]
        for name in importlib.import_module(package).__all__
        if not name.startswith("__")
    ]
    assert [".".join(one) for one in public if not is_documented(*one, entries)] == []


def unpublished(command: str) -> set[str]:
    """Distributions of this repository that a command of pip in a checkout needs and does not name."""
    named, needed = set(), set()
    for word in shlex.split(command):
        place, _, extras = word.rstrip("]").partition("[")
        file = ROOT / place / "pyproject.toml"
        if file.exists():
            project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
            optional = [project["optional-dependencies"][extra] for extra in filter(None, extras.split(","))]
            named.add(project["name"])
            needed |= {Requirement(text).name for text in chain(project["dependencies"], *optional)}
    return {name for name in needed if name.startswith("core-rl")} - named


@pytest.mark.parametrize("page", ALL_PAGES, ids=ids)
def test_installs_in_checkout_name_all_parts(page: Path) -> None:
    """core-rl is in no package index."""
    commands = [line for block in blocks_of(page) if block.language == "sh" for line in commands_of(block)]
    installs = [line for line in commands if "pip install" in line and "--no-deps" not in line]
    assert {line: unpublished(line) for line in installs if unpublished(line)} == {}


def test_missing_part_of_install_is_listed() -> None:
    assert unpublished('pip install ".[train]" ./plugins/fsdp') == {"core-rl-trainer"}


def test_skipped_blocks_are_listed() -> None:
    reasons = Counter(block.reason for page in PAGES for block in blocks_of(page) if block.reason)
    assert reasons == NOT_RUN


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = [str(page.relative_to(DOCS)) for page in DOCS.glob("**/*.md")]
    assert [page for page in pages if f": {page}\n" not in navigation] == []


def test_reports_have_no_local_paths() -> None:
    texts = [path.read_text(encoding="utf-8") for path in sorted((DOCS / "results").glob("*.json"))]
    path = re.compile(r'[\s"=](/(?!v1/|inference/)[a-z]\S*)')  # routes of servers are no paths
    assert texts and not [match for text in texts for match in path.findall(text)]


def test_the_tests_behind_the_invariants_exist() -> None:
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    links = re.findall(r"\[`(test_\w+)`\]\(([^)]+)\)", page)
    assert links
    missing = [
        name for name, path in links if f"def {name}(" not in (DOCS / path).read_text(encoding="utf-8")
    ]
    assert missing == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A page: one\n[a](none.md) [b](#a-page-one) [c](page.md#two) [d](https://x.y/z)", encoding="utf-8"
    )
    assert list(broken_links(page)) == ["none.md", "page.md#two"]


def test_page_has_sizes_of_tiny_models() -> None:
    text = (DOCS / "certify-an-engine.md").read_text(encoding="utf-8")
    rows = re.findall(r"^  \| (\w+) ((?:\| \d+ )+)\|$", text, re.MULTILINE)
    assert len(rows) == 5
    for family, sizes in rows:
        config = TinyModel(family=family).config()
        expected = [config.num_hidden_layers, config.hidden_size, config.intermediate_size]
        expected += [
            config.num_attention_heads,
            config.num_key_value_heads,
            head_size(config),
            config.vocab_size,
        ]
        assert [int(size) for size in re.findall(r"\d+", sizes)] == expected
