"""The page of checks, and the command that prints them."""

from __future__ import annotations

from pathlib import Path

import pytest

from core_rl.errors import ConfigError
from core_rl_conformance.catalogue import load_checks, natural_order
from core_rl_conformance.handbook import checks_page, chosen, text_of

PAGE = Path(__file__).parents[2] / "docs" / "checks.md"
CHECKS = load_checks()


def test_the_page_is_that_of_the_checks() -> None:
    assert PAGE.read_text(encoding="utf-8") == checks_page(CHECKS.values()), (
        "docs/checks.md is not what the checks say; write it again: core-rl checks --markdown docs/checks.md"
    )


@pytest.mark.parametrize("name", CHECKS)
def test_every_check_has_a_heading_where_its_failure_points(name: str) -> None:
    assert f"### {name}\n" in checks_page([CHECKS[name]])
    said = text_of(CHECKS[name])
    assert said.startswith(f"{name} (") and "  Why: " in said and "  Look at: " in said


def test_names_choose_by_their_beginning_in_natural_order() -> None:
    found = [check.identifier for check in chosen(CHECKS, ["I1.", "I20.adamw"])]
    assert found[-2:] == ["I20.adamw", "I20.adamw-value-head"] and len(found) > 3
    assert all(name.startswith("I1.") for name in found[:-2])
    assert found == sorted(found, key=natural_order)
    assert len(chosen(CHECKS, [])) == len(CHECKS)


def test_an_unknown_name_is_an_error_that_says_it() -> None:
    with pytest.raises(ConfigError, match="no check is called I99"):
        chosen(CHECKS, ["I7", "I99"])
