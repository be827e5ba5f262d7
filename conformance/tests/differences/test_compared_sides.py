"""Sides of a comparison that cannot be compared are refused, each with all reasons."""

from __future__ import annotations

from pathlib import Path

import pytest

from core_rl.errors import ConfigError
from core_rl_conformance.differences.run import compare


@pytest.mark.parametrize(
    ("side", "message"),
    [
        ("plain", "'plain': expected NAME:FILE"),
        ("trainers.recipes:SPEC:missing.json", "'trainers.recipes:SPEC:missing.json': expected NAME:FILE"),
        ("nothing:{file}", "--trainer=nothing: no installed trainer is called so"),
        (
            "trainers.recipes:WITHOUT_RECIPES:{file}",
            "(?s)declares no 'gradients', which core-rl diff needs.*declares no 'recipes'",
        ),
    ],
)
def test_sides_without_settings_are_refused(side: str, message: str, tmp_path: Path) -> None:
    settings = tmp_path / "settings.json"
    settings.write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        compare(side.format(file=settings), f"trainers.recipes:SPEC:{settings}", None, 0)
