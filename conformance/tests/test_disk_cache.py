"""Expected values on disk: read instead of computed, bounded, and never of other code or a broken file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from core_rl_conformance.disk_cache import DiskCache
from core_rl_conformance.expected_values import ExpectedValues
from core_rl_conformance.inputs.data import ragged
from core_rl_conformance.inputs.losses import TokenMeanLoss
from core_rl_conformance.inputs.tiny_models import TinyModel
from core_rl_oracle.oracle import Oracle

MODEL = TinyModel(family="qwen3", seed=0)
DATA = ragged(MODEL.vocab_size, 0, (5, 2, 7))
LOSS = TokenMeanLoss()


def _refuse(*_: object) -> int:
    raise AssertionError("computed")


def test_a_second_session_computes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, dtype = DiskCache(tmp_path / "cache", "code"), torch.float32
    with ExpectedValues(tmp_path / "first", cache=cache) as first:
        outputs = first.outputs(MODEL, DATA, "logprobs", 1.0, dtype)
        gradients = first.gradients(MODEL, DATA, LOSS, dtype)
    with monkeypatch.context() as patch, ExpectedValues(tmp_path / "second", cache=cache) as second:
        patch.setattr(Oracle, "__init__", _refuse)
        outputs_again = second.outputs(MODEL, DATA, "logprobs", 1.0, dtype)
        gradients_again = second.gradients(MODEL, DATA, LOSS, dtype)
    torch.testing.assert_close(outputs_again.values, outputs.values, rtol=0, atol=0)
    torch.testing.assert_close(
        dict(gradients_again.oracle.grads), dict(gradients.oracle.grads), rtol=0, atol=0
    )
    assert outputs_again.tolerance == outputs.tolerance
    assert gradients_again.tolerances == gradients.tolerances
    assert (gradients_again.loss, gradients_again.norm) == (gradients.loss, gradients.norm)


def test_other_code_or_inputs_are_computed(tmp_path: Path) -> None:
    assert DiskCache(tmp_path, "code").get("key", lambda: 1) == 1
    assert DiskCache(tmp_path, "code").get("key", _refuse) == 1
    assert DiskCache(tmp_path, "code").get("other key", lambda: 2) == 2
    assert DiskCache(tmp_path, "other code").get("key", lambda: 3) == 3


def test_a_broken_file_is_replaced(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, "code")
    cache.get("key", lambda: 1)
    (path,) = tmp_path.iterdir()
    for broken in (b"", path.read_bytes()[:100]):
        path.write_bytes(broken)
        assert cache.get("key", lambda: 2) == 2
        assert cache.get("key", _refuse) == 2


def test_the_oldest_files_go(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, "code")
    for age, key in enumerate(("new", "old", "oldest")):
        before = set(tmp_path.iterdir())
        cache.get(key, lambda: 1)
        (path,) = set(tmp_path.iterdir()) - before
        os.utime(path, (1000 - age, 1000 - age))
        size = path.stat().st_size
    cache.trim(2 * size)
    assert len(list(tmp_path.iterdir())) == 2
    assert cache.get("new", _refuse) == cache.get("old", _refuse) == 1
