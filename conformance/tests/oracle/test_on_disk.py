from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from core_rl_conformance.inputs.data import ragged
from core_rl_conformance.inputs.losses import TokenMeanLoss
from core_rl_conformance.inputs.tiny_models import ModelStore, TinyModel
from core_rl_oracle import on_disk
from core_rl_oracle.on_disk import copied
from core_rl_oracle.oracle import Oracle
from core_rl_oracle.plain import VARIANTS, PlainModel

LOSS = TokenMeanLoss()
LARGE = 100


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of temporary files; it is empty at the end."""
    directory = tmp_path / "files"
    directory.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(directory))
    return directory


def in_files(tensors: Iterable[Tensor]) -> list[bool]:
    large = [value for value in tensors if value.numel() >= LARGE]
    assert large
    return [value.untyped_storage().filename is not None for value in large]


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gpt2"])
def test_values_on_disk_are_the_same(
    tmp_path: Path, files: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    model = TinyModel(family=family)
    directory, sequences = (
        ModelStore(tmp_path).directory(model),
        ragged(model.vocab_size, seed=0).for_oracle(),
    )
    memory, plain_memory = Oracle(directory), PlainModel(directory, "lm", torch.float32)
    expected = memory.gradients(sequences, LOSS.of_sequence)
    rounded = [plain_memory.gradients(variant, sequences, LOSS.of_sequence, 1.0) for variant in VARIANTS]
    assert not any(in_files([*memory.model.parameters(), *expected.grads.values()]))
    monkeypatch.setattr(on_disk, "LARGE", LARGE)
    disk, plain_disk = Oracle(directory), PlainModel(directory, "lm", torch.float32)
    got = disk.gradients(sequences, LOSS.of_sequence)
    assert got.loss == expected.loss
    assert list(got.grads) == list(expected.grads)
    assert all(got.grads[name].equal(value) for name, value in expected.grads.items())
    assert all(disk.parameters()[name].equal(value) for name, value in memory.parameters().items())
    assert all(in_files([*disk.model.parameters(), *disk.parameters().values(), *got.grads.values()]))
    for variant, (loss, grads) in zip(VARIANTS, rounded, strict=True):
        same_loss, same_grads = plain_disk.gradients(variant, sequences, LOSS.of_sequence, 1.0)
        assert same_loss == loss
        assert all(same_grads[name].equal(value) for name, value in grads.items())
    assert not list(files.iterdir())


def test_tensors_end_with_their_files(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_disk, "LARGE", LARGE)
    value = torch.arange(200.0).view(10, 20).mT
    copy = copied(value)
    assert in_files([copy]) == [True]
    assert copy.equal(value)
    copy += 1
    assert copy.equal(value + 1)
    assert copied(value[:2]).untyped_storage().filename is None
    assert not list(files.iterdir())
