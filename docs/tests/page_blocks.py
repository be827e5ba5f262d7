"""Code blocks of Markdown pages."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GENERATED = DOCS / "checks.md"
PAGES = [ROOT / "README.md", *(page for page in sorted(DOCS.glob("**/*.md")) if page != GENERATED)]
FENCE = re.compile(
    r"(?:^<!-- not run: (?P<reason>[^>]*?) -->\n+)?"
    r"^(?P<indent> *)(?P<fence>```+)(?P<language>\w*)(?P<options>[^\n]*)\n(?P<code>.*?)^(?P=indent)(?P=fence)",
    re.MULTILINE | re.DOTALL,
)
PART = " (part)"
_TITLE = re.compile(r'title="([^"]+)"')


@dataclass(frozen=True, kw_only=True)
class Block:
    """One fenced block of a page."""

    language: str
    code: str
    line: int
    """Line of the page that holds the first line of ``code``."""
    title: str | None
    """Path of the file that the reader writes the block to, or has from a command; None for a block that is no file."""
    is_part: bool
    """Whether the block repeats lines of that file."""
    reason: str | None
    """Why the tests do not run the block, from the comment above it; None for a block that they run."""


def blocks_of(page: Path) -> list[Block]:
    """All fenced blocks of ``page`` in their order."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in FENCE.finditer(text):
        title = _TITLE.search(match["options"])
        found.append(
            Block(
                language=match["language"],
                code=textwrap.dedent(match["code"]),
                line=text.count("\n", 0, match.start("code")) + 1,
                title=title[1].removesuffix(PART) if title else None,
                is_part=title is not None and title[1].endswith(PART),
                reason=match["reason"],
            )
        )
    return found


def name_of(page: Path) -> str:
    """The page's path below the repository root."""
    return str(page.relative_to(ROOT))


def commands_of(block: Block) -> list[str]:
    """The commands of a shell block, without comments and with continued lines joined."""
    joined = block.code.replace("\\\n", " ")
    lines = (re.sub(r"(^|\s)#.*", "", line).strip() for line in joined.splitlines())
    return [line for line in lines if line]
