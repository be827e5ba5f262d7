"""Printed reproductions: run without core-rl, they draw the suite's weights and compute the oracle's numbers."""

from __future__ import annotations

import ast
import math
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import isolated_scripts
import pytest
import torch
from mutants.all import MUTANTS
from mutants.zoo import case_of, make_engine
from safetensors.torch import load_file
from torch import Tensor

from core_rl_conformance.engine_under_test import EngineUnderTest
from core_rl_conformance.expected_values import ExpectedValues, Snapshot
from core_rl_conformance.inputs.data import Ragged, ragged
from core_rl_conformance.inputs.losses import (
    CheckLoss,
    OutputsLoss,
    RepeatedLoss,
    RewardLoss,
    SequenceMeanLoss,
    TokenMeanLoss,
    ValueLoss,
)
from core_rl_conformance.inputs.tiny_models import MAX_LENGTH, OTHER_LAYERS, ModelStore, TinyModel
from core_rl_conformance.profile import DENSE, MOE
from core_rl_conformance.reproduction import (
    HiddenStates,
    Output,
    Quantity,
    Weights,
    computation_of,
    reproduction,
)
from core_rl_oracle.oracle import Oracle

LM, VALUE = TinyModel(family="llama"), TinyModel(family="llama", head="value")
LENGTHS = (5, 1, 9, 12)
MOST_LINES = 40
"""Of a script."""
QUANTITIES: tuple[tuple[TinyModel, Quantity], ...] = (
    *((LM, Output(name, 0.8)) for name in ("logprobs", "entropy", "logits")),
    *((LM, HiddenStates(layer)) for layer in (0, 1, 2)),
    *((VALUE, Output(name, 1.0)) for name in ("values", "bootstrap", "scores")),
    (LM, TokenMeanLoss(temperature=0.8)),
    (LM, SequenceMeanLoss()),
    (LM, OutputsLoss(names=("logprobs", "entropy", "logits"), temperature=0.8)),
    (VALUE, ValueLoss(temperature=0.7)),
    (replace(VALUE, head="reward"), RewardLoss()),
    (LM, Weights()),
)
"""Every quantity of a script."""
MODELS = (
    *(TinyModel(family=family, seed=3) for family in (*DENSE, *OTHER_LAYERS)),
    *(TinyModel(family=family, long=True) for family in ("llama", "qwen3", "gemma2")),
    TinyModel(family="qwen2", vocabulary=1543, heads=5, kv_heads=1, layers=3, eos=(3, 7)),
)


def _script(model: TinyModel, quantity: Quantity, data: Ragged) -> str:
    computation = computation_of(model, quantity, data)
    assert computation is not None
    return reproduction(computation, ("heading", "model and engine."), {}, {}, {})


def _outputs_of(scripts: Sequence[str], directory: Path) -> list[Path]:
    """Directories in which ``scripts`` ran without core-rl, each with its ``output``."""
    places = [directory / str(number) for number in range(len(scripts))]
    for script, place in zip(scripts, places, strict=True):
        assert len(script.splitlines()) <= MOST_LINES
        place.mkdir(parents=True)
        (place / "script.py").write_text(script)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, isolated_scripts.__file__, *map(str, places)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return places


def _printed(place: Path) -> dict[str, list[float]]:
    """Numbers by the name that the script prints in front of them."""
    lines = re.findall(r"^(\S.*?) \[[\d, ]*\] (\S.*)$", (place / "output").read_text(), re.MULTILINE)
    return {name: torch.tensor(ast.literal_eval(text)).flatten().tolist() for name, text in lines}


def _expected(oracle: Oracle, quantity: Quantity, data: Ragged) -> dict[str, Tensor]:
    sequences = data.for_oracle()
    if isinstance(quantity, Output):
        rows = oracle.evaluate(sequences, quantity.temperature)
        return {f"sequence {number}": row[quantity.name] for number, row in enumerate(rows)}
    if isinstance(quantity, HiddenStates):
        states = [part[:, quantity.layer] for part in oracle.hidden_states(sequences)]
        return {f"sequence {number}": row for number, row in enumerate(states)}
    assert isinstance(quantity, CheckLoss)
    truth = oracle.gradients(sequences, quantity.of_sequence, quantity.temperature)
    return {"loss": torch.tensor(truth.loss), "norm": torch.tensor(truth.norm), **truth.grads}


def _assert_printed(place: Path, expected: Mapping[str, Tensor]) -> None:
    printed = _printed(place)
    assert printed.keys() == expected.keys()
    for name, value in expected.items():
        numbers = torch.tensor(printed[name], dtype=torch.float64)
        truth = value.double().flatten() if value.numel() <= MAX_LENGTH else value.double().norm()[None]
        assert torch.allclose(numbers, truth, rtol=1e-6, atol=1e-7), name


def _assert_drawn(place: Path, directory: Path) -> None:
    """Require the weights of ``directory``, bit for bit, in the directory that the script writes."""
    weights, original = (load_file(path / "model.safetensors") for path in (place / "tiny-model", directory))
    assert weights.keys() == original.keys()
    assert all(torch.equal(weights[name], value) for name, value in original.items())


def test_scripts_compute_the_oracles_numbers(tmp_path: Path) -> None:
    store, data = ModelStore(tmp_path / "models"), ragged(LM.vocab_size, 0, LENGTHS)
    scripts = [_script(model, quantity, data) for model, quantity in QUANTITIES]
    places = _outputs_of(scripts, tmp_path)
    for (model, quantity), place in zip(QUANTITIES, places, strict=True):
        directory = store.directory(model)
        _assert_drawn(place, directory)
        if not isinstance(quantity, Weights):
            _assert_printed(place, _expected(Oracle(directory, model.head), quantity, data))


@pytest.mark.parametrize("family", ["llama", MOE])
def test_script_reads_a_given_model(tmp_path: Path, family: str) -> None:
    directory = ModelStore(tmp_path / "models").directory(TinyModel(family=family))
    model, data = TinyModel(family=family, source=str(directory)), ragged(LM.vocab_size, 0, LENGTHS)
    quantities: tuple[Quantity, ...] = (HiddenStates(1), TokenMeanLoss(temperature=0.8))
    places = _outputs_of([_script(model, quantity, data) for quantity in quantities], tmp_path / "scripts")
    for quantity, place in zip(quantities, places, strict=True):
        _assert_printed(place, _expected(Oracle(directory), quantity, data))


@pytest.mark.nightly
def test_scripts_draw_every_model(tmp_path: Path) -> None:
    store, quantity = ModelStore(tmp_path / "models"), TokenMeanLoss(temperature=0.8)
    batches = [ragged(model.vocab_size, 1, LENGTHS) for model in MODELS]
    scripts = [_script(model, quantity, data) for model, data in zip(MODELS, batches, strict=True)]
    places = _outputs_of(scripts, tmp_path)
    for model, data, place in zip(MODELS, batches, places, strict=True):
        _assert_drawn(place, store.directory(model))
        _assert_printed(place, _expected(Oracle(store.directory(model)), quantity, data))


FAILING = (
    "entropy-is-detached",
    "one-token-late",
    "logits-without-temperature",
    "scores-the-first-token",
    "attends-to-neighbours",
    "one-token-is-none",
    "vectors-not-loaded",
    "reports-one-token-late",
)
"""Mutants of gradients, outputs, drawn batches, weights and generated tokens; the first of them by day."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] * (name != FAILING[0])) for name in FAILING]
)
def test_reproduction_repeats_the_failure(tmp_path: Path, name: str) -> None:
    (mutant,) = [mutant for mutant in MUTANTS if mutant.name == name]
    case = case_of(mutant.killed_by, mutant.spec, layout=mutant.layout, family=mutant.family)
    with ExpectedValues(tmp_path / "expected", make_engine=make_engine) as expected_values:
        subject = EngineUnderTest(case, expected_values, tmp_path)
        with pytest.raises(AssertionError):
            case.check.function(subject)
    (directory,) = _outputs_of([subject.reproduction], tmp_path / "scripts")
    text = (directory / "output").read_text()
    assert subject.reproduction.startswith(f"# {mutant.killed_by}: ")
    pairs = re.findall(r"expected (\S+), the engine gave (\S+)", text)
    errors = [abs(float(expected) - float(got)) for expected, got in pairs]
    # The oracle's numbers give the same error.
    assert any(math.isclose(error, subject.measurements[-1].error, rel_tol=1e-3) for error in errors)


@pytest.mark.parametrize(
    ("of", "quantity"),
    [
        (TinyModel(family="qwen3_moe"), Output("logprobs", 1.0)),
        (TinyModel(family="llama", exact=True), Output("logprobs", 1.0)),
        (LM, Output("aux_loss", 1.0)),
        (LM, RepeatedLoss()),
        (TinyModel(family="llama", source="model", head="value"), Output("values", 1.0)),
        (Snapshot(Path("weights")), Weights()),
    ],
)
def test_quantities_out_of_reach_have_none(of: object, quantity: Quantity) -> None:
    assert computation_of(of, quantity) is None
