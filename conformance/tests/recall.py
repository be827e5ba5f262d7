"""Recall: bugs that projects shipped, and the check that kills a mutant of each; run to write ``docs/recall.md``."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mutants.all import MUTANTS
from trainers.mutants import MUTANTS as TRAINER_MUTANTS

from core_rl_conformance.report.files import write_text

BUGS = Path(__file__).parents[2] / "docs" / "recall.toml"
REPOSITORIES = {
    "AReaL": "areal-project/AReaL",
    "Automodel": "NVIDIA-NeMo/Automodel",
    "Megatron-LM": "NVIDIA/Megatron-LM",
    "NeMo-RL": "NVIDIA-NeMo/RL",
    "OpenRLHF": "OpenRLHF/OpenRLHF",
    "SkyRL": "NovaSky-AI/SkyRL",
    "TRL": "huggingface/trl",
    "TensorRT-LLM": "NVIDIA/TensorRT-LLM",
    "accelerate": "huggingface/accelerate",
    "miles": "radixark/miles",
    "peft": "huggingface/peft",
    "prime-rl": "PrimeIntellect-ai/prime-rl",
    "pytorch": "pytorch/pytorch",
    "slime": "THUDM/slime",
    "torchtitan": "pytorch/torchtitan",
    "transformers": "huggingface/transformers",
    "verl": "verl-project/verl",
    "vllm": "vllm-project/vllm",
}
TITLES = {
    "engine": "Train engines",
    "trainer": "Trainers",
    "server": "Rollout engines, servers and weight sync",
}
HEAD = """# Recall

Bugs that projects of this field have shipped, each replayed as a mutant from its report. A mutant is an engine, a
server or a trainer with that fault, and `nox -s mutants` fails unless the named check kills it. The list is
[recall.toml](recall.toml); this page is written by `python conformance/tests/recall.py docs/recall.md`. Most mutants
were written after their report was read: the share is no estimate for bugs that nobody has reported.
"""


@dataclass(frozen=True, kw_only=True)
class Bug:
    """One report, and its mutants by name, each with its check."""

    source: str
    """``project#number``."""
    part: str
    summary: str
    kills: Mapping[str, str]
    miss: str

    @property
    def link(self) -> str:
        """In Markdown."""
        project, number = self.source.split("#")
        return f"[{project} #{number}](https://github.com/{REPOSITORIES[project]}/issues/{number})"


def load_bugs() -> list[Bug]:
    """The bugs with mutants of the same source; raises `KeyError` for a mutant that does not exist."""
    checks = {mutant.name: mutant.killed_by for mutant in MUTANTS}
    checks |= {mutant.__name__: identifier for mutant, identifier, _ in TRAINER_MUTANTS}
    sources = {mutant.name: f"{mutant.issue} " for mutant in MUTANTS}
    bugs = []
    for entry in tomllib.loads(BUGS.read_text(encoding="utf-8"))["bug"]:
        project, number = entry["source"].split("#")
        names = [*entry.get("mutants", ())]
        names += [name for name, text in sources.items() if _names(text, f"{project} #{number}")]
        kills = {name: checks[name] for name in names}
        bugs.append(
            Bug(
                source=entry["source"],
                part=entry["part"],
                summary=entry["summary"],
                kills=kills,
                miss=entry.get("miss", ""),
            )
        )
    return bugs


def _names(text: str, source: str) -> bool:
    """Whether ``text`` has the source, and not the beginning of a longer number."""
    start = text.find(source)
    return start >= 0 and not text[start + len(source)].isdigit()


def page(bugs: Sequence[Bug]) -> str:
    """The page in Markdown."""
    return "\n".join(_lines(bugs)) + "\n"


def _lines(bugs: Sequence[Bug]) -> Iterator[str]:
    killed = sum(bool(bug.kills) for bug in bugs)
    yield HEAD
    yield f"**{killed} of {len(bugs)}** are killed ({killed / len(bugs):.0%})."
    for part, title in TITLES.items():
        rows = [bug for bug in bugs if bug.part == part]
        yield f"\n## {title}\n\n| bug | report | killed by | mutants |\n| --- | --- | --- | --- |"
        for bug in rows:
            checks = ", ".join(f"`{check}`" for check in dict.fromkeys(bug.kills.values()))
            mutants = ", ".join(f"`{name}`" for name in bug.kills)
            yield f"| {bug.summary} | {bug.link} | {checks or 'nothing'} | {mutants or bug.miss} |"


if __name__ == "__main__":
    write_text(Path(sys.argv[1]), page(load_bugs()))
