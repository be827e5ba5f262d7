#!/usr/bin/env python3
"""Count phrases and names that engineers of this field do not write: python tools/words.py [--list KIND] [FOLDER ...]

Reads the Python and Markdown files that git tracks, changelogs excepted: docstrings, texts of fields, comments, error
messages, names of variables, arguments and tests, and the subjects of the last 60 commits. Prints a row for each
measure, with its limit and its value in torchtitan, prime-rl, tinker-cookbook and httpx. `--list KIND` adds the places
of a measure, by a word of its row; `--strict` exits with 1 if a measure is over its limit. See docs/vocabulary.md.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Measure:
    """A row: hits of ``kind`` for each ``scale`` of the counted ``unit``."""

    kind: str
    unit: str
    scale: float
    limit: float
    peers: str
    pattern: re.Pattern[str] | None = None
    """Phrase in prose; None for kinds with code of their own."""


def _phrase(kind: str, peers: str, pattern: str) -> Measure:
    return Measure(kind, "words", 1e4, 2.0, peers, re.compile(pattern))


CLAUSES = "begins with a clause"
SENTENCES = "sentences over 28 words"
NAMES = "vague names"
LONG_TESTS = "test names over 8 words"
PRONOUN_TESTS = "test names with that, which, one, other"
LONG_SUBJECTS = "commit subjects over 72 characters"
VERBLESS_SUBJECTS = "commit subjects that begin with no verb"
MEASURES = (
    _phrase(
        "those of, those that",
        "0-0.1",
        r"\b[Tt]hose (?:of|that|who|which|with|in|on|from|for|below|above)\b",
    ),
    _phrase(
        "one that, the one of",
        "1-1.7",
        r"\b(?:the )?ones? (?:that|which|who|of|before|after|whose|with)\b",
    ),
    _phrase(
        "what it is, what they have",
        "1.1-1.8",
        r"\b[Ww]hat (?:is|was|it|they|has|had|a|an|the|another|other|ranks|we|goes|comes|must|may|can|does|no|each)\b",
    ),
    _phrase("who, nobody, stranger", "0-0.4", r"\b(?:[Ss]omebody|[Nn]obody|[Ww]ho|strangers?)\b"),
    _phrase("says, tells, told", "0.3-0.7", r"\b(?:says?|tells?|told|said)\b"),
    _phrase(
        "metaphors",
        "-",
        r"\b(?:beside|seats?|held|without a word|mend(?:s|ed)?|goes on|go on|takes? turns|meeting point|welcome|hungry|"
        r"settle[ds]?|guests?)\b",
    ),
    Measure(CLAUSES, "docstrings", 100, 1.0, "0-1.2"),
    Measure(SENTENCES, "words", 1e4, 10.0, "-"),
    Measure(NAMES, "names", 100, 0.5, "0-0.4"),
    Measure(LONG_TESTS, "tests", 100, 5.0, "1-9"),
    Measure(PRONOUN_TESTS, "tests", 100, 3.0, "1"),
    Measure(LONG_SUBJECTS, "subjects", 100, 10.0, "13-22"),
    Measure(VERBLESS_SUBJECTS, "subjects", 100, 10.0, "-"),
)
CLAUSE = re.compile(
    r"^(?:What|Who|Those|How|Where|Whether it|That which|So many|So often|As many|As |Of |By |At most|From |It |They |"
    r"Both |Its |All that)\b"
)
VAGUE = re.compile(
    r"(?:own|found|chosen|said|those|wanted|given|whole|each|others?|asked|held|kept|named|here|there|what|who|away|once|"
    r"apart|few|told|meant|reached|begun)"
)
PRONOUN = re.compile(
    r"_(?:that|which|who|whose|what|those|one|ones|another|other|others|nobody|somebody)(?=_|$)"
)
CODE = re.compile(r"```.*?```|``.*?``|`[^`]*`", re.DOTALL)
VERB = re.compile(
    r"(?:\[[\w/ -]+\] |[\w/-]+: )?[A-Z]?[a-z]+(?:e|d|t|x|n|p|w|y|k|l|r|s|m|ove|dd)\b"
    r"(?<!^The)(?<!^An)(?<!^A)(?<!^One)(?<!^By)(?<!^Of)(?<!^What)(?<!^Who)(?<!^Where)(?<!^No)"
)


class Counts:
    """Hits by kind and totals by unit; writes the hits of kinds that contain ``listed``."""

    def __init__(self, listed: str) -> None:
        self.hits: Counter[str] = Counter()
        self.totals: Counter[str] = Counter()
        self._listed = listed

    def hit(self, kind: str, place: str, text: str) -> None:
        """Count a hit at ``place``."""
        self.hits[kind] += 1
        if self._listed and self._listed in kind:
            sys.stdout.write(f"{place}: {' '.join(text.split())[:140]}\n")

    def prose(self, text: str, place: str) -> None:
        """Count words, phrases and long sentences, outside of code."""
        text = CODE.sub("x", text)
        self.totals["words"] += len(re.findall(r"\w+", text))
        for measure in MEASURES:
            for match in measure.pattern.finditer(text) if measure.pattern else ():
                self.hit(measure.kind, place, text[max(0, match.start() - 50) : match.end() + 50])
        for block in re.split(r"\n\s*\n|\n\s*[-|*#>]|\n\d+\.", text):
            for sentence in re.split(r"(?<=[.!?:;])\s+", block):
                if len(re.findall(r"\w+", sentence)) > 28:
                    self.hit(SENTENCES, place, sentence)

    def docstring(self, text: str, place: str) -> None:
        """Count a docstring, or the text of a field."""
        self.totals["docstrings"] += 1
        if CLAUSE.match(text):
            self.hit(CLAUSES, place, text)
        self.prose(text, place)

    def name(self, text: str, place: str) -> None:
        """Count a variable or an argument."""
        self.totals["names"] += 1
        if VAGUE.fullmatch(text.strip("_")):
            self.hit(NAMES, place, text)

    def test(self, name: str, place: str) -> None:
        """Count a test function."""
        self.totals["tests"] += 1
        if len(name.split("_")) > 9:
            self.hit(LONG_TESTS, place, name)
        if PRONOUN.search(name):
            self.hit(PRONOUN_TESTS, place, name)

    def subject(self, commit: str, text: str) -> None:
        """Count the subject of a commit."""
        self.totals["subjects"] += 1
        if len(text) > 72:
            self.hit(LONG_SUBJECTS, commit, text)
        if not VERB.match(text):
            self.hit(VERBLESS_SUBJECTS, commit, text)


def count_python(source: str, path: str, counts: Counts) -> None:
    """Count the prose and names of a module."""
    for node in ast.walk(ast.parse(source)):
        place = f"{path}:{getattr(node, 'lineno', 1)}"
        match node:
            case ast.Module() | ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                if text := ast.get_docstring(node):
                    counts.docstring(text, place)
                for line, text in _field_texts(node.body):
                    counts.docstring(text, f"{path}:{line}")
                if not isinstance(node, ast.Module | ast.ClassDef) and node.name.startswith("test_"):
                    counts.test(node.name, place)
            case ast.Raise(exc=ast.expr() as raised):
                counts.prose(_strings(raised), place)
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                counts.name(name, place)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith(("#!", "# noqa", "# type")):
            counts.prose(token.string.lstrip("# "), f"{path}:{token.start[0]}")


def _field_texts(body: Sequence[ast.stmt]) -> Iterator[tuple[int, str]]:
    for field, below in zip(body, body[1:], strict=False):
        match field, below:
            case ast.AnnAssign() | ast.Assign(), ast.Expr(value=ast.Constant(value=str(text))):
                yield below.lineno, text


def _strings(node: ast.expr) -> str:
    parts = (part.value for part in ast.walk(node) if isinstance(part, ast.Constant))
    return " ".join(part for part in parts if isinstance(part, str))


def _git(*arguments: str) -> list[str]:
    """Lines of a git command; none outside of a repository, such as in an unpacked archive."""
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    return done.stdout.splitlines() if done.returncode == 0 else []


def _files(folders: Sequence[str]) -> list[str]:
    """Tracked files of ``folders``, or without git all files outside of hidden directories."""
    paths = (path for folder in folders or ["."] for path in Path(folder).rglob("*"))
    return _git("ls-files", *folders) or [
        str(path) for path in paths if not any(part.startswith(".") for part in path.parts)
    ]


def main() -> None:
    """Count, print the table, and with ``--strict`` exit with 1 for a measure over its limit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "folders", nargs="*", metavar="FOLDER", help="tracked folders or files; by default all"
    )
    parser.add_argument("--list", default="", metavar="KIND", help="print the places of this measure")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a measure is over its limit")
    arguments = parser.parse_args()
    counts, files = Counts(arguments.list), 0
    for path in _files(arguments.folders):
        if "changelog" in path.lower() or not path.endswith((".py", ".md")) or not Path(path).exists():
            continue
        files += 1
        source = Path(path).read_text(encoding="utf-8")
        (counts.prose if path.endswith(".md") else lambda s, p: count_python(s, p, counts))(source, path)
    for line in _git("log", "-60", "--no-merges", "--format=%h %s"):
        commit, _, subject = line.partition(" ")
        counts.subject(commit, subject)
    over = 0
    for measure in MEASURES:
        value = measure.scale * counts.hits[measure.kind] / max(1, counts.totals[measure.unit])
        over += value > measure.limit
        verdict = "OVER" if value > measure.limit else "ok  "
        sys.stdout.write(
            f"{verdict} {measure.kind:42s} {value:6.1f}  limit {measure.limit:4.1f}  "
            f"peers {measure.peers:8s} per {measure.scale:g} {measure.unit}\n"
        )
    totals = ", ".join(f"{counts.totals[unit]} {unit}" for unit in ("words", "docstrings", "names", "tests"))
    sys.stdout.write(f"{over} of {len(MEASURES)} measures over their limit ({files} files, {totals})\n")
    sys.exit(arguments.strict and over > 0)


if __name__ == "__main__":
    main()
