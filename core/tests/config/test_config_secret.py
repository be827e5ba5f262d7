"""Secrets in configs: references to environment variables, which alone are shown."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from core_rl.config.base import Config, parse_config
from core_rl.config.describe import describe_fields
from core_rl.config.loading import apply_overrides
from core_rl.config.secret import SecretReference, hidden, literal_secrets
from core_rl.errors import ConfigError

KEY = "sk-0123456789"


class Section(Config):
    """A section with a key."""

    api_key: SecretReference | None = None
    """A key."""
    size: int = 0
    """A number."""


class Whole(Config):
    """A config with the section."""

    section: Section = Section()
    """A section."""


def test_reference_is_read_when_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = parse_config(Whole, {"section": {"api_key": "${env:SERVER_KEY}"}})
    key = found.section.api_key
    assert key is not None
    with pytest.raises(
        ConfigError, match=r"\$\{env:SERVER_KEY\}: the environment variable SERVER_KEY is not set"
    ):
        key.read()
    monkeypatch.setenv("SERVER_KEY", KEY)
    assert key.read() == KEY
    shown = [repr(found), str(found.model_dump()), found.model_dump_json(), str(describe_fields(Whole))]
    assert not any(KEY in text for text in shown)
    assert (
        parse_config(Whole, found.model_dump()) == parse_config(Whole, found.model_dump(mode="json")) == found
    )


@pytest.mark.parametrize(
    "values",
    [
        {"section": {"api_key": KEY}},
        {"section": {"api_key": KEY, "size": -0.5}},
        {"sectoin": {"api_key": KEY}},
        {"section": [{"api_key": [KEY]}]},
        {"section": {"api-key": KEY}},
        {"admin_api_key": KEY},
        {"section": {"api_key": {"password": KEY}}},
    ],
)
def test_a_secret_itself_is_refused_and_not_repeated(values: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(Whole, values)
    with pytest.raises(ValidationError) as raw:
        Whole.model_validate(values)
    assert KEY not in f"{caught.value}{raw.value}"


def test_the_message_shows_how_to_write_a_reference() -> None:
    expected = r"field 'section.api_key' = '\*\*\*': .* write '\$\{env:NAME\}'"
    with pytest.raises(ConfigError, match=expected):
        parse_config(Whole, {"section": {"api_key": KEY}})


def test_secrets_are_found_at_any_depth() -> None:
    values = {
        "engines": {"a": {"options": {"api_key": KEY, "max_total_tokens": 5}}, "b": [{"HF_TOKEN": KEY}]},
        "password": 7,
        "api_keys": [KEY, "${env:SECOND}"],
        "eos_token": "</s>",
        "fine": {"api_key": "${env:NAME}", "secret": None},
    }
    found = [sentence.split("'")[1] for sentence in literal_secrets(values)]
    assert found == ["engines.a.options.api_key", "engines.b.0.HF_TOKEN", "password", "api_keys.0"]
    assert not literal_secrets({"values": hidden("", values)["fine"]})
    assert KEY not in str(hidden("", values))


def test_override_error_hides_secret() -> None:
    with pytest.raises(ConfigError, match="'api_key' is '\\*\\*\\*'"):
        apply_overrides({"api_key": KEY}, ["api_key.value=1"])
