"""End tokens of a model: of its tokenizer and its configs, in one set."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from core_rl.checkpoint.end_tokens import end_tokens, write_end_tokens
from core_rl.errors import ConfigError

TOKENS = ["a", "b", "<pad>", "<s>", "</s>", "<|end|>", "<|eot|>"]
END, EOT = 5, 6
TURNS = "{% for m in messages %}<s>{{ m['content'] }}<|end|>a{% endfor %}"


def save_model(directory: Path, eos: str | None = None, generation: Any = None, **config: Any) -> Path:
    AutoConfig.for_model("qwen2", vocab_size=len(TOKENS), **config).save_pretrained(directory)
    if eos is not None:
        words = Tokenizer(models.WordLevel({token: n for n, token in enumerate(TOKENS)}, unk_token="a"))
        words.add_special_tokens(TOKENS[2:])
        PreTrainedTokenizerFast(tokenizer_object=words, eos_token=eos).save_pretrained(directory)
    if generation is not None:
        GenerationConfig(eos_token_id=generation).save_pretrained(directory)
    return directory


@pytest.mark.parametrize(
    ("eos", "config", "generation", "expected"),
    [
        (None, None, None, ()),
        ("<|eot|>", None, None, (EOT,)),
        ("<|eot|>", END, None, (END, EOT)),
        ("<|eot|>", 4, [END, EOT], (4, END, EOT)),
        (None, [4, END], None, (4, END)),
        (None, 4, END, (4, END)),
        ("<|eot|>", 99, [100, -1], (EOT,)),
    ],
)
def test_end_tokens_unite_tokenizer_and_configs(
    tmp_path: Path, eos: str | None, config: Any, generation: Any, expected: tuple[int, ...]
) -> None:
    directory = save_model(tmp_path, eos, generation, eos_token_id=config)
    assert end_tokens(AutoConfig.from_pretrained(directory), directory) == expected


@pytest.mark.parametrize(
    ("template", "eos", "expected"),
    [
        (TURNS, "</s>", (4, END)),
        (TURNS, None, ()),
        (TURNS.replace("<|end|>", "</s>"), "</s>", (4,)),
        (TURNS.replace("<|end|>", "a"), "</s>", (4,)),
        ("{{ raise_exception('no') }}", "</s>", (4,)),
        ("{{ messages[0].content[0].text + 1 }}", "</s>", (4,)),
        ({"default": TURNS, "tool_use": TURNS.replace("<|end|>", "<|eot|>")}, "</s>", (4, END, EOT)),
    ],
)
def test_turn_ends_join_end_tokens(
    tmp_path: Path, template: Any, eos: str | None, expected: tuple[int, ...]
) -> None:
    directory = save_model(tmp_path, "</s>")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.chat_template, tokenizer.eos_token = template, eos
    tokenizer.save_pretrained(directory)
    assert end_tokens(AutoConfig.from_pretrained(directory, eos_token_id=None), directory) == expected


def test_default_ends_of_config_class_are_ignored(tmp_path: Path) -> None:
    AutoConfig.for_model("llama", vocab_size=len(TOKENS)).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "eos_token_id"})
    )
    config = AutoConfig.from_pretrained(tmp_path)
    assert end_tokens(config, tmp_path) == (2,), "as transformers has it without a generation config"
    GenerationConfig(eos_token_id=END).save_pretrained(tmp_path)
    assert end_tokens(config, tmp_path) == (END,)


def test_nested_text_configs_have_end_tokens(tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        "gemma3", text_config={"vocab_size": 8, "eos_token_id": 4}, eos_token_id=[END]
    )
    assert end_tokens(config, None) == (4, END)


@pytest.mark.parametrize("text", ["", "{}", '"other"', '{"added_tokens": []}'])
def test_unreadable_tokenizers_have_no_end_token(tmp_path: Path, text: str) -> None:
    directory = save_model(tmp_path, eos_token_id=END)
    (directory / "tokenizer.json").write_text(text)
    assert end_tokens(AutoConfig.from_pretrained(directory), directory) == (END,)


@pytest.mark.parametrize(
    "text",
    ["{", "[]", *(f'{{"eos_token_id": {end}}}' for end in ('"2"', "[[2]]", "2.0", "true", "[null]", "{}"))],
)
def test_unreadable_generation_configs_are_named(tmp_path: Path, text: str) -> None:
    directory = save_model(tmp_path, eos_token_id=END)
    (directory / "generation_config.json").write_text(text)
    with pytest.raises(
        ConfigError, match=r"generation_config\.json: (its fields of generation|eos_token_id is)"
    ):
        end_tokens(AutoConfig.from_pretrained(directory), directory)


@pytest.mark.parametrize(
    ("generation", "ends", "written"),
    [
        (None, (END,), END),
        (None, (END, EOT), [END, EOT]),
        ({"temperature": 0.5, "eos_token_id": 4, "_from_model_config": True}, (4, EOT), [4, EOT]),
        ({"eos_token_id": [EOT, 4]}, (4, EOT), [EOT, 4]),
        ({"temperature": 0.5}, (END,), [END]),
    ],
)
def test_exports_stop_at_all_end_tokens(
    tmp_path: Path, generation: dict[str, Any] | None, ends: tuple[int, ...], written: list[int] | int
) -> None:
    path = tmp_path / "generation_config.json"
    if generation is not None:
        path.write_text(json.dumps(generation))
    config = AutoConfig.for_model("qwen2", eos_token_id=END)
    write_end_tokens(tmp_path, config, ends, None)
    saved = json.loads(path.read_text())
    assert saved.get("eos_token_id") == written
    assert "_from_model_config" not in saved
    assert saved.get("temperature") == (generation or {}).get("temperature")


@pytest.mark.parametrize("generation", [None, {"temperature": 0.25, "do_sample": True}])
@given(
    older=st.fixed_dictionaries(
        {},
        optional={
            "temperature": st.sampled_from([0.5, 1.0]),
            "do_sample": st.booleans(),
            "top_p": st.just(0.9),
            "top_k": st.just(5),
            "max_length": st.just(33),
            "repetition_penalty": st.just(1.2),
            "forced_bos_token_id": st.just(2),
            "suppress_tokens": st.just([1, 3]),
            "eos_token_id": st.sampled_from([END, [4, END]]),
        },
    )
)
@settings(max_examples=25)
def test_older_generation_fields_survive_an_export(
    generation: dict[str, Any] | None, older: dict[str, Any]
) -> None:
    with TemporaryDirectory() as name:
        model, export = save_model(Path(name, "model")), Path(name, "export")
        export.mkdir()
        path = model / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | older))
        if generation is not None:
            for directory in (model, export):
                (directory / "generation_config.json").write_text(json.dumps(generation))
        config = AutoConfig.from_pretrained(model)
        config.save_pretrained(export)
        write_end_tokens(export, config, end_tokens(config, model), str(model))
        sources = ("generation_config.json", "config.json")
        expected = GenerationConfig.from_pretrained(
            model, sources[generation is None], _from_model_config=generation is None
        )
        exported = GenerationConfig.from_pretrained(export)
        names = {*older, *(generation or {})} - {"eos_token_id"}
        assert {n: getattr(exported, n) for n in names} == {n: getattr(expected, n) for n in names}
