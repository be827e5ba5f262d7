"""A user's sequences in place of drawn ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from plugin_support import run
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from core_rl.errors import ConfigError
from core_rl_conformance.given_data import read_sequences
from core_rl_conformance.inputs.data import GIVEN_LENGTHS, given

pytest_plugins = ["pytester"]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}u {{ m.content }} "
    "{% endfor %}"
)
USER, TOOL = (json.dumps({"messages": [{"role": role, "content": "b a"}]}) for role in ("user", "tool"))
LINES = ("[5, 7, 30, 0, 3]", '{"input_ids": [1, 2, 3, 4], "labels": [0]}', "", '{"text": "a b a"}', USER)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with words a, b and u, and a chat template."""
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=31,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=24,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    words = Tokenizer(WordLevel({"a": 8, "b": 9, "u": 10, "?": 11}, unk_token="?"))
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, chat_template=TEMPLATE).save_pretrained(path)
    return path


def test_lines_are_ids_texts_and_chats(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("\n".join(LINES))
    sequences = read_sequences(tmp_path / "rows.jsonl", directory)
    assert sequences == ((5, 7, 30, 0, 3), (1, 2, 3, 4), (8, 9, 8), (10, 9, 8))
    rows = given(sequences, 1).rows
    assert [row.ids for row in rows] == [sequences[number % 4] for number in (6, 7, 8, 9, 10, 11)]
    assert all(len(row.mask) == len(row.advantages) == len(row.ids) for row in rows)
    assert len(rows) == len(GIVEN_LENGTHS)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1, 31]", "line 1: token id 31 is not in the model's vocabulary of 31"),
        ("[-1]", "line 1: token id -1 is not in "),
        ("[]", "line 1: it has no token$"),
        (json.dumps([1] * 25), "line 1: it has 25 tokens; the model takes 24; shorten it"),
        ('{"prompt": "a"}', r"line 1: it has no token ids; write \[1, 2\], "),
        ("[1, 2.0]", "line 1: it has no token ids; write "),
        ("[true]", "line 1: it has no token ids; write "),
        ("{", "line 1: Expecting property name"),
        (TOOL, "line 1: no tools"),
        ("", "it is empty; write one sequence in a line: "),
        ("[1]\n[32]\n{\n", "2 problems:\n  - line 2: token id 32 .*\n  - line 3: Expecting"),
    ],
)
def test_unusable_lines_are_refused(directory: Path, tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "rows.jsonl").write_text(line)
    with pytest.raises(ConfigError, match=message) as raised:
        read_sequences(tmp_path / "rows.jsonl", directory)
    assert str(raised.value).startswith(f"--data={tmp_path / 'rows.jsonl'}: ")


def test_session_judges_on_given_sequences(pytester: pytest.Pytester, directory: Path) -> None:
    (pytester.path / "rows.jsonl").write_text("\n".join(LINES))
    options = ["--engine=reference", "--engine=reference-rollout", "--data=rows.jsonl", "--report=r.json"]
    checks = ["--check=I7.logprobs", "--check=I1.gradients", "--check=I7.score"]
    result = run(pytester, *options, *checks, f"--model-dir={directory}", "--pyargs", "core_rl_conformance")
    assert result.ret == pytest.ExitCode.OK
    assert len(json.loads((pytester.path / "r.json").read_text())["results"]) == len(checks)
    refused = run(pytester, *options, "--pyargs", "core_rl_conformance")
    refused.stderr.fnmatch_lines(
        ["ERROR: --data=rows.jsonl: sequences are for a given model; give --model-dir*"]
    )
