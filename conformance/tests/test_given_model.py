"""Train engines are judged on a user's model directory."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from plugin_support import run
from transformers import AutoModelForCausalLM, MistralConfig

from core_rl.errors import ConfigError
from core_rl_conformance import given_model
from core_rl_conformance.expected_values import ExpectedValues
from core_rl_conformance.given_model import read_given
from core_rl_conformance.inputs.data import ragged
from core_rl_conformance.inputs.losses import TokenMeanLoss
from core_rl_conformance.inputs.tiny_models import ModelStore, TinyModel
from core_rl_conformance.procedures import training
from core_rl_conformance.procedures.training import rows_of
from core_rl_oracle.plain import ALONE, TRAINED_ALONE, VARIANTS

pytest_plugins = ["pytester"]
LOSS = TokenMeanLoss()
LONE_ROWS = (ALONE, TRAINED_ALONE)
CHECKS = ("I7.logprobs", "I1.gradients", "I4.clipping")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of a family and of sizes that the suite has not, in bfloat16 as published ones."""
    config = MistralConfig(
        vocab_size=333,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=5,
        num_attention_heads=6,
        num_key_value_heads=3,
        max_position_embeddings=96,
        sliding_window=None,
    )
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("given")
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)
    return path


def test_checks_run_on_a_given_model(
    pytester: pytest.Pytester, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "LARGE", 1000)  # steps of most tensors are compared in rows
    options = [f"--check={name}" for name in (*CHECKS, "I7.values")]
    result = run(
        pytester,
        "--engine=reference",
        f"--model-dir={directory}",
        "--report=report.json",
        *options,
        "--pyargs",
        "core_rl_conformance",
    )
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(["model: * (mistral, *; 3 of 4 checks, since the others invent *"])
    cases = json.loads((pytester.path / "report.json").read_text())["results"]
    assert {(case["check"], case["model"], case["outcome"]) for case in cases} == {
        (name, "mistral", "passed") for name in CHECKS
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--layout=three"], "--layout=three: no layout; write degrees as in dp2*"),
        (["--layout=dp2"], "'reference': layout dp2 needs data_parallel, undeclared by the engine*"),
        (["--model=qwen3"], "*the profiles have mistral*"),
        (["--soak=1"], "--soak with --model-dir: a soak draws models; leave either out"),
        (["--trainer=core-rl"], "--model-dir with 'core-rl': trainers choose their models; *"),
    ],
)
def test_options_of_a_given_model_are_refused(
    pytester: pytest.Pytester, directory: Path, options: list[str], message: str
) -> None:
    arguments = ["--engine=reference", f"--model-dir={directory}", *options]
    result = run(pytester, *arguments, "--pyargs", "core_rl_conformance")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: *{message}"])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "no config.json there"),
        ("{", "config.json has no model_type"),
        ("[]", "config.json has no model_type"),
        ('{"model_type": "bert-of-tomorrow"}', "does not know the model type 'bert-of-tomorrow'"),
        ('{"model_type": "llama"}', "holds neither model.safetensors"),
    ],
)
def test_directory_without_a_model_is_refused(tmp_path: Path, config: str | None, message: str) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(ConfigError, match=message) as raised:
        read_given(tmp_path)
    assert "\n" not in str(raised.value)
    assert str(raised.value).startswith(f"--model-dir={tmp_path}: ")


@pytest.mark.parametrize(
    ("names", "match"),
    [
        (["BYTES_EACH"], r"takes \S+ GiB of memory \(there are"),
        (["DISK_BYTES_EACH"], r"takes \S+ GiB of free disk in /\S+ \(there are"),
        (["BYTES_EACH", "DISK_BYTES_EACH"], r"memory \(there are \S+\) and \S+ GiB of free disk"),
    ],
)
def test_too_little_memory_or_disk_is_refused(
    directory: Path, monkeypatch: pytest.MonkeyPatch, names: list[str], match: str
) -> None:
    for name in names:
        monkeypatch.setattr(given_model, name, 1 << 40)
    with pytest.raises(ConfigError, match=match):
        read_given(directory)


@pytest.mark.parametrize(("given", "alone"), [(True, 1), (False, 0)])
def test_rounding_of_lone_rows_counts(tmp_path: Path, directory: Path, given: bool, alone: int) -> None:
    """On SmolLM2 the products of a micro-batch of three tokens round ten times as much as those of a longer one."""
    model = TinyModel(family="mistral", source=str(directory)) if given else TinyModel(family="llama")
    data = ragged(model.vocab_size, seed=0)
    with ExpectedValues(tmp_path) as values:
        expected = values.outputs(model, data, "logprobs", 1.0, torch.float32)
        plain = values.plain(model, torch.float32)
        rows = plain.outputs(ALONE, data.for_oracle(), 1.0)
        gradients = [plain.gradients(of, data.for_oracle(), LOSS.of_sequence, 1.0) for of in LONE_ROWS]
    assert len(expected.variants) == len(VARIANTS) + alone
    assert gradients[0][0] == pytest.approx(gradients[1][0])
    torch.testing.assert_close(gradients[0][1], gradients[1][1], rtol=1e-4, atol=1e-5)
    if alone:
        assert all(row["logprobs"].equal(got) for row, got in zip(rows, expected.variants[-1], strict=True))


def test_rows_of_large_tensors_are_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "LARGE", 100)
    tensors = {"small": torch.arange(100.0), "large": torch.arange(7000.0).reshape(70, 100)}
    rows = rows_of(tensors)
    assert rows["small"].equal(tensors["small"])
    assert rows["large"].equal(tensors["large"][:: math.ceil(7000 / 100)])


def test_tiny_models_are_compared_whole(tmp_path: Path) -> None:
    model = TinyModel(family="qwen3_moe")
    state = AutoModelForCausalLM.from_pretrained(ModelStore(tmp_path).directory(model)).state_dict()
    assert max(value.numel() for value in state.values()) <= training.LARGE
