"""Our files that run in a call, for tests of the pages that list them."""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).parents[2]
SHIPPED = re.compile(r"(core|conformance|src)/core_rl\w*/")
_traced: set[str] = set()


def start_trace() -> None:
    """Record the files of functions that run in this thread and in threads that start later."""
    threading.setprofile(_record)
    sys.setprofile(_record)


def stop_trace() -> None:
    """Record no more, in this thread and in later ones."""
    threading.setprofile(None)
    sys.setprofile(None)
    _traced.clear()


def _record(frame: FrameType, event: str, _: object) -> None:
    if event == "call":
        _traced.add(frame.f_code.co_filename)


def traced_files() -> frozenset[str]:
    """The shipped files that ran since the last call, relative to the repository."""
    files = [file.removeprefix(f"{ROOT}/") for file in _traced.copy() if file.startswith(f"{ROOT}/")]
    _traced.clear()
    return frozenset(filter(SHIPPED.search, files))


def listed_files(page: str, section: str) -> list[str]:
    """The Python files that ``section`` of a page in ``docs`` links to before its next heading."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8").partition(f"\n{section}\n")[2]
    return re.findall(r"\]\(\.\./([^)#]+\.py)\)", text.partition("\n#")[0])
