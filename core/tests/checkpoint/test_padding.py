"""Padding tokens of exported value and reward models: transformers gives equal scores alone and in a batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from core_rl.checkpoint.end_tokens import set_padding

LETTERS = "abcdefgh"
END = len(LETTERS)
TEXTS = ["a", "bcd", "efghab"]
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_labels": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"intermediate_size": 16, "num_key_value_heads": 1, "tie_word_embeddings": False},
    "gpt2": {"n_positions": 32},
}


def save_model(
    directory: Path,
    special: list[str],
    family: str = "qwen2",
    rows: int = 0,
    pad: int | None = None,
    **names: Any,
) -> None:
    """A classifier with ``rows`` spare embeddings and a tokenizer of letters and ``special`` tokens from `END` on."""
    words = Tokenizer(models.WordLevel({letter: n for n, letter in enumerate(LETTERS)}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    words.add_special_tokens(special)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **names)
    tokenizer.chat_template = "<|im_start|>{{ messages[0].content }}"
    tokenizer.save_pretrained(directory)
    config = AutoConfig.for_model(family, **SIZES, **FAMILIES[family])
    config.vocab_size, config.pad_token_id = len(LETTERS) + len(special) + rows, pad
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(directory)


def scores(directory: Path, pad: int | None, rows: list[list[int]]) -> list[float]:
    """The scores of ``rows``, each alone, without a padding token."""
    model = AutoModelForSequenceClassification.from_pretrained(directory, pad_token_id=pad).eval()
    with torch.no_grad():
        return [model(input_ids=torch.tensor([row])).logits.item() for row in rows]


EOS: dict[str, Any] = {"eos_token": "</s>"}
FULL = ["</s>", "<unk>", "<s>", "<|im_start|>", "<|box|>", "<|image_pad|>"]


@pytest.mark.parametrize(
    ("special", "model", "ends", "padding"),
    [
        (FULL, EOS, (END,), "<|image_pad|>"),
        (FULL, EOS | {"pad_token": "</s>", "pad": END}, (END,), "<|image_pad|>"),
        (FULL, EOS | {"pad_token": "<|box|>", "pad": END}, (END,), "<|box|>"),
        (FULL, EOS | {"pad": END + 4}, (END,), "<|box|>"),
        (FULL, EOS | {"pad": 1}, (END,), "<|image_pad|>"),
        (FULL, EOS | {"pad_token": "<|box|>", "pad": END + 4}, (END, END + 4), "<|image_pad|>"),
        (FULL[:5], EOS | {"unk_token": "<unk>", "pad_token": "<unk>", "pad": END + 1}, (END,), "<s>"),
        (FULL[:4], EOS | {"unk_token": "<unk>", "bos_token": "<s>"}, (END,), "<s>"),
        (FULL[:1], EOS | {"rows": 3}, (END,), "<|pad|>"),
        (FULL[:1], EOS | {"pad_token": "[PAD]"}, (END,), None),
        (FULL[:1], EOS | {"bos_token": "</s>", "pad_token": "</s>", "pad": END}, (END,), None),
        (FULL[:5], EOS | {"family": "gpt2", "padding_side": "left"}, (END,), "<unk>"),
    ],
)
def test_batches_have_the_scores_of_sequences_alone(
    tmp_path: Path, special: list[str], model: dict[str, Any], ends: tuple[int, ...], padding: str | None
) -> None:
    save_model(tmp_path, special, **model)
    rows = [[*(LETTERS.index(letter) for letter in text), END] for text in TEXTS]
    expected = scores(tmp_path, None, rows)
    config = AutoConfig.from_pretrained(tmp_path)
    set_padding(tmp_path, config, ends)
    config.save_pretrained(tmp_path)
    assert scores(tmp_path, config.pad_token_id, rows) == pytest.approx(expected, abs=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert config.pad_token_id == (None if padding is None else tokenizer.convert_tokens_to_ids(padding))
    if padding is None:
        return
    assert tokenizer.pad_token == padding
    found = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    batch = tokenizer([f"{text}</s>" for text in TEXTS], padding=True, return_tensors="pt")
    with torch.no_grad():
        assert found(**batch).logits.flatten().tolist() == pytest.approx(expected, abs=1e-5)


def test_right_padding_leaves_tokenizer_files_alone(tmp_path: Path) -> None:
    save_model(tmp_path, FULL, **EOS, pad_token="<|box|>")
    before = {path.name: path.read_bytes() for path in tmp_path.glob("*token*")}
    set_padding(tmp_path, AutoConfig.from_pretrained(tmp_path), (END,))
    assert {path.name: path.read_bytes() for path in tmp_path.glob("*token*")} == before


def test_older_tokenizer_files_name_the_padding(tmp_path: Path) -> None:
    save_model(tmp_path, FULL, **EOS, pad_token="</s>")
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "</s>", "pad_token": "</s>"}))
    set_padding(tmp_path, AutoConfig.from_pretrained(tmp_path), (END,))
    assert json.loads((tmp_path / "special_tokens_map.json").read_text())["pad_token"] == "<|image_pad|>"
    assert AutoTokenizer.from_pretrained(tmp_path).pad_token == "<|image_pad|>"


@pytest.mark.parametrize(("pad", "expected"), [(END, None), (3, 3), (None, None)])
def test_nested_configs_without_tokenizer_keep_padding(
    tmp_path: Path, pad: int | None, expected: int | None
) -> None:
    config = AutoConfig.for_model("gemma3", text_config={"pad_token_id": pad})
    set_padding(tmp_path, config, (END,))
    assert (config.pad_token_id, config.get_text_config().pad_token_id) == (expected, expected)
