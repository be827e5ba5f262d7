"""Runs scripts, each in a directory of its own, without core-rl: their output, or their error.

A program of its own, which imports torch and transformers once; each script runs in a fork.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

PACKAGES = ("core_rl", "core_rl_conformance", "core_rl_oracle")


class _Blocker:
    """Refuses to import core-rl."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] in PACKAGES:
            raise ImportError(f"{name} is imported by a reproduction")


def _run(directory: Path) -> None:
    script, output = directory / "script.py", directory / "output"
    os.chdir(directory)
    with output.open("w") as file, contextlib.redirect_stdout(file):
        exec(compile(script.read_text(), str(script), "exec"), {"__name__": "__main__"})


def main(directories: list[str]) -> int:
    """The number of failed scripts."""
    sys.meta_path.insert(0, _Blocker())
    import torch
    from transformers import LlamaForCausalLM, LlamaForSequenceClassification

    torch.set_num_threads(1)
    assert {LlamaForCausalLM, LlamaForSequenceClassification}
    failures = 0
    for directory in directories:
        child = os.fork()
        if not child:
            _run(Path(directory))
            os._exit(0)
        failures += os.waitpid(child, 0)[1] != 0
    return failures


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
