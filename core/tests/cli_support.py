"""Commands of ``core-rl`` inside a test."""

from __future__ import annotations

import pytest

from core_rl.cli import main


def run_command(*arguments: str) -> int:
    """The exit code of ``core-rl`` with ``arguments``."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return int(caught.value.code or 0)
