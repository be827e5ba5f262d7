"""The time that chat templates read: that of the beginning of a run."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import training_support as support
import yaml

from core_rl.config.base import parse_config
from core_rl.errors import ConfigError
from core_rl_trainer.data.chat_template import ChatFormat
from core_rl_trainer.data.config import DataSection
from core_rl_trainer.data.encoding import encode_prompt
from core_rl_trainer.plan.data import earlier_runs, with_template_time
from core_rl_trainer.plan.identity import RunIdentity
from core_rl_trainer.recipe.recipe import Recipe

DATED = (
    "{% macro date(format) %}{{ strftime_now(format) }}{% endmacro %}"
    "{% if strftime_now is defined %}{{ strftime_now('%d') }}{% endif %}{{ date('%Y') }}="
    "{% for m in messages %}{{ m.content }}{% endfor %}"
)
TIME = datetime(2017, 8, 5, 13, 30, tzinfo=UTC)


def make_tokenizer(template: Any = DATED) -> Any:
    return support.make_tokenizer(template)


def make_recipe(directory: Path, time: Any = None, **changes: Any) -> Recipe:
    values = support.recipe_values(Path("start"), directory, **changes)
    values["data"] |= {} if time is None else {"template_time": time}
    return parse_config(Recipe, values)


def timed(recipe: Recipe, tokenizer: Any) -> DataSection:
    """The section ``data`` of a run of ``recipe``."""
    earlier = earlier_runs(recipe.directory, recipe.fresh, recipe.resume_from)
    return with_template_time(recipe.data, tokenizer, earlier)


def record(recipe: Recipe) -> None:
    recipe.directory.mkdir(parents=True)
    (recipe.directory / "recipe.yaml").write_text(yaml.safe_dump(RunIdentity.of(recipe).recipe))


def test_templates_format_the_given_time() -> None:
    tokenizer = make_tokenizer()
    ids = encode_prompt(ChatFormat(tokenizer=tokenizer, time=TIME), [{"role": "user", "content": "1+2"}])
    assert tokenizer.decode(ids, skip_special_tokens=True) == "052017=1+2"


@pytest.mark.parametrize(
    "changes", [{}, {"resume_from": "{old}"}, {"resume_from": "{old}/checkpoints/step-1"}]
)
def test_resumed_runs_keep_the_template_time(tmp_path: Path, changes: dict[str, str]) -> None:
    record(make_recipe(tmp_path / "old", TIME))
    old = {name: value.format(old=tmp_path / "old") for name, value in changes.items()}
    recipe = make_recipe(tmp_path / ("new" if changes else "old"), **old)
    assert timed(recipe, make_tokenizer()).template_time == TIME


def test_new_runs_get_the_present_time(tmp_path: Path) -> None:
    record(make_recipe(tmp_path / "old", TIME))
    for changes in ({"output_dir": str(tmp_path / "new")}, {"fresh": True}):
        recipe = make_recipe(tmp_path / "old").model_copy(update=changes)
        started = timed(recipe, make_tokenizer({"default": DATED})).template_time
        assert started is not None and started.year > TIME.year


def test_template_time_is_part_of_the_identity(tmp_path: Path) -> None:
    before, now = (RunIdentity.of(make_recipe(tmp_path, time)) for time in (TIME, "2018-01-01"))
    (change,) = before.refused_changes(now)
    assert change.startswith(
        "data.template_time: '2017-08-05T13:30:00Z' then, '2018-01-01T00:00:00' now (the tokens"
    )


def test_runs_of_earlier_versions_keep_their_clock(tmp_path: Path) -> None:
    record(make_recipe(tmp_path / "old"))
    assert timed(make_recipe(tmp_path / "old"), make_tokenizer()).template_time is None


def test_unread_template_time_is_refused(tmp_path: Path) -> None:
    plain = make_tokenizer("{{ messages[0].content }}")
    assert timed(make_recipe(tmp_path), plain).template_time is None
    with pytest.raises(ConfigError, match="data.template_time = 2017-08-05 .*does not read the time"):
        timed(make_recipe(tmp_path, TIME), plain)
