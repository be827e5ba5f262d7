"""Keys in recipes: refused before anything is written, references are kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from core_rl.errors import ConfigError
from core_rl_trainer.plan.identity import differing_fields
from core_rl_trainer.recipe.recipe import load_recipe

KEY = "sk-0123456789"
ENGINES = "engines: {sglang: {options: {api_key: %s}}}"


@pytest.mark.parametrize(
    ("text", "overrides"),
    [
        (ENGINES % KEY, []),
        (ENGINES % "'${env:SGLANG_KEY}'", [f"engines.sglang.options.api_key={KEY}"]),
        ("", [f"engines.sglang.options.api_key={KEY}"]),
    ],
)
def test_secret_in_recipe_is_refused_and_hidden(tmp_path: Path, text: str, overrides: list[str]) -> None:
    (tmp_path / "recipe.yaml").write_text(text)
    message = r"'engines.sglang.options.api_key' = \*\*\*: .* write '\$\{env:NAME\}'"
    with pytest.raises(ConfigError, match=message) as caught:
        load_recipe(tmp_path / "recipe.yaml", overrides)
    assert KEY not in str(caught.value)


def test_a_reference_is_no_error_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(ENGINES % "'${env:SGLANG_KEY}'")
    with pytest.raises(ConfigError, match="field 'model' is required") as caught:
        load_recipe(tmp_path / "recipe.yaml")
    assert "api_key" not in str(caught.value)


def test_secret_of_earlier_run_is_hidden() -> None:
    old, new = ({"options": {"api_key": key}} for key in (KEY, "${env:SGLANG_KEY}"))
    assert differing_fields(old, new) == {
        "options.api_key": "options.api_key: '***' then, '${env:SGLANG_KEY}' now"
    }
