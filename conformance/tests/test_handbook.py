"""The page of checks, and the command that prints them."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from core_rl.errors import ConfigError
from core_rl_conformance.catalogue import Check, load_checks, natural_order
from core_rl_conformance.handbook import checks_page, described_checks, select_checks, text_of

PAGE = Path(__file__).parents[2] / "docs" / "checks.md"
CHECKS = load_checks()


def test_checks_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == checks_page(CHECKS.values()), (
        "docs/checks.md is not what the checks say; write it again: core-rl checks --markdown docs/checks.md"
    )


def test_checks_are_described_as_they_are() -> None:
    factors = described_checks()
    assert [one.identifier for one in factors] == list(CHECKS)
    differing = [
        (one.identifier, field.name)
        for one in factors
        for field in fields(Check)
        if field.name != "function"
        and getattr(one, field.name) != getattr(CHECKS[one.identifier], field.name)
    ]
    assert differing == []


COMMAND = """
import sys
from core_rl.cli import main
try:
    main(["checks", "I7"])
except SystemExit as end:
    assert not end.code, end.code
print(*sorted(set(sys.modules) & {"torch", "transformers", "numpy", "hypothesis"}), file=sys.stderr)
"""


def test_checks_command_imports_nothing_heavy() -> None:
    result = subprocess.run([sys.executable, "-c", COMMAND], capture_output=True, text=True, check=True)
    assert "I7.logprobs (train engines)" in result.stdout
    assert result.stderr.split() == []


@pytest.mark.parametrize("name", CHECKS)
def test_every_check_has_its_heading(name: str) -> None:
    assert f"### {name}\n" in checks_page([CHECKS[name]])
    message = text_of(CHECKS[name])
    assert message.startswith(f"{name} (") and "  Why: " in message and "  Look at: " in message


def test_names_choose_by_their_beginning_in_natural_order() -> None:
    selected = [check.identifier for check in select_checks(CHECKS, ["I1.", "I20.adamw"])]
    assert selected[-2:] == ["I20.adamw", "I20.adamw-value-head"] and len(selected) > 3
    assert all(name.startswith("I1.") for name in selected[:-2])
    assert selected == sorted(selected, key=natural_order)
    assert len(select_checks(CHECKS, [])) == len(CHECKS)


def test_unknown_check_name_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no check is called I99"):
        select_checks(CHECKS, ["I7", "I99"])
