from __future__ import annotations

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


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory for tensors; those of tiny models are large."""
    monkeypatch.setattr(on_disk, "LARGE", 100)
    directory = tmp_path / "files"
    directory.mkdir()
    return directory


def in_files(tensors: list[Tensor]) -> list[bool]:
    large = [value for value in tensors if value.numel() >= 100]
    assert large
    return [value.untyped_storage().filename is not None for value in large]


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gpt2"])
def test_values_on_disk_are_the_same(tmp_path: Path, files: Path, family: str) -> None:
    model = TinyModel(family=family)
    directory, sequences = (
        ModelStore(tmp_path).directory(model),
        ragged(model.vocab_size, seed=0).for_oracle(),
    )
    memory, disk = Oracle(directory), Oracle(directory, disk=files)
    expected, got = (oracle.gradients(sequences, LOSS.of_sequence) for oracle in (memory, disk))
    assert got.loss == expected.loss
    assert list(got.grads) == list(expected.grads)
    assert all(got.grads[name].equal(value) for name, value in expected.grads.items())
    assert all(disk.parameters()[name].equal(value) for name, value in memory.parameters().items())
    tensors = [*disk.model.parameters(), *disk.parameters().values(), *got.grads.values()]
    assert all(in_files(tensors))
    assert not any(in_files([*memory.model.parameters(), *expected.grads.values()]))
    assert not list(files.iterdir())


def test_plain_models_on_disk_are_the_same(tmp_path: Path, files: Path) -> None:
    model = TinyModel(family="qwen3")
    directory, sequences = (
        ModelStore(tmp_path).directory(model),
        ragged(model.vocab_size, seed=0).for_oracle(),
    )
    memory, disk = (PlainModel(directory, "lm", torch.float32, disk=where) for where in (None, files))
    for variant in VARIANTS:
        expected, got = (
            plain.gradients(variant, sequences, LOSS.of_sequence, 1.0) for plain in (memory, disk)
        )
        assert got[0] == expected[0]
        assert all(got[1][name].equal(value) for name, value in expected[1].items())
        assert all(in_files([*got[1].values(), *disk.model(variant).parameters()]))
    assert not list(files.iterdir())


def test_tensors_end_with_their_files(files: Path) -> None:
    value = torch.arange(200.0).view(10, 20).mT
    copy = copied(value, files)
    assert copy.equal(value)
    copy += 1
    assert copy.equal(value + 1)
    assert copied(value[:2], files).untyped_storage().filename is None
    assert not list(files.iterdir())
