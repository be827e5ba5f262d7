"""The tiny mixture of experts: choices that no rounding changes, and its written names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from core_rl_conformance.inputs.data import LENGTHS, LONG, ragged
from core_rl_conformance.inputs.tiny_models import ModelStore, TinyModel
from core_rl_conformance.profile import MOE
from core_rl_oracle.experts import Choice, watched
from core_rl_oracle.float64 import float64_only
from core_rl_oracle.oracle import Oracle
from core_rl_oracle.plain import VARIANTS, PlainModel

MARGIN = 10.0
"""Times the largest error of a router's logits in bfloat16."""


def _choices(model: torch.nn.Module, ids: list[list[int]]) -> list[Choice]:
    """Choices of all sequences, by layer."""
    rows = []
    for row in ids:
        with torch.no_grad(), watched(model) as choices:
            model(input_ids=torch.tensor([row]), use_cache=False)
        rows.append(list(choices))
    return [
        Choice(torch.cat([r[layer].logits for r in rows]), torch.cat([r[layer].experts for r in rows]))
        for layer in range(len(rows[0]))
    ]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", [0, 1, 2, 100])
def test_no_rounding_changes_a_choice(tmp_path: Path, seed: int) -> None:
    model = TinyModel(family=MOE, seed=seed)
    directory = ModelStore(tmp_path).directory(model)
    data = [ragged(model.vocab_size, 1000 * seed, lengths) for lengths in (LENGTHS, LONG)]
    ids = [list(row.ids) for part in data for row in part.rows]
    with float64_only():
        truth = _choices(Oracle(directory).model, ids)
    half = _choices(PlainModel(directory, "lm", torch.bfloat16).model(VARIANTS[0]), ids)
    assert len(truth) == 2
    for exact, rounded in zip(truth, half, strict=True):
        best = exact.logits.sort(-1, descending=True).values
        error = float((exact.logits - rounded.logits.double()).abs().max())
        assert float((best[:, 1] - best[:, 2]).min()) > MARGIN * error
        counts = exact.experts.flatten().bincount(minlength=5).sort().values.tolist()
        assert counts[0] == 0 < counts[1] < counts[2] / 2


def test_checkpoint_names_and_values_match_files(tmp_path: Path) -> None:
    model = TinyModel(family=MOE)
    directory = ModelStore(tmp_path).directory(model)
    parameters, files = Oracle(directory).parameters(), load_file(directory / "model.safetensors")
    assert parameters.keys() == files.keys()
    assert all(torch.equal(parameters[name].float(), files[name]) for name in files)


def test_weights_are_set_by_written_names(tmp_path: Path) -> None:
    store = ModelStore(tmp_path)
    oracle, second = (Oracle(store.directory(TinyModel(family=MOE, seed=seed))) for seed in (0, 1))
    oracle.set_parameters(second.parameters())
    pairs = zip(oracle.parameters().values(), second.parameters().values(), strict=True)
    assert all(torch.equal(left, right) for left, right in pairs)
