"""Refusals of models, options and packages, before anything is built."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import mindspore_support as support
import pytest
from engine_support import TINY, batch
from transformers import AutoConfig

from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.engine.loading import load_engine
from core_rl.errors import (
    BatchError,
    CoreRLError,
    LayoutError,
    MissingPackage,
    UnsupportedCapability,
    UnsupportedPackage,
)
from core_rl.registry import packages
from core_rl_mindspore import SPEC
from core_rl_mindspore.model import check_family

YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
HALF = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
MODELS: list[tuple[Mapping[str, Any], str]] = [
    ({"model_type": "gemma2"}, "no model of the family 'gemma2'.*'fsdp'"),
    ({"model_type": "qwen3_moe"}, "no model of the family 'qwen3_moe'"),
    ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding attention"),
    ({"rope_parameters": YARN}, "rope_type='yarn'"),
    ({"rope_parameters": HALF}, "partial_rotary_factor"),
]


@pytest.mark.parametrize(("changes", "says"), MODELS, ids=[str(next(iter(row[0].items()))) for row in MODELS])
def test_unfit_model_is_refused(changes: Mapping[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedCapability, match=says):
        check_family(AutoConfig.for_model(**TINY | dict(changes)))


CONFIGS: list[tuple[Mapping[str, Any], type[CoreRLError], str]] = [
    ({"dtype": "bfloat16"}, UnsupportedCapability, "bfloat16"),
    ({"device": "cuda"}, CoreRLError, "cuda|CUDA"),
    ({"layout": {"tp": 2}}, LayoutError, "tensor_parallel"),
    ({"model": {"lora": {"rank": 2}}}, UnsupportedCapability, "lora"),
    ({"optimizer": {"type": "muon"}}, UnsupportedCapability, "muon"),
    ({"offload_optimizer": True}, UnsupportedCapability, "offload"),
    ({"changes": {"attention_dropout": 0.1}}, UnsupportedCapability, "attention_dropout"),
]


@pytest.mark.parametrize(
    ("fields", "error", "says"), CONFIGS, ids=[str(next(iter(row[0]))) for row in CONFIGS]
)
def test_undeclared_setting_is_refused(
    fields: Mapping[str, Any], error: type[CoreRLError], says: str
) -> None:
    with pytest.raises(error, match=says):
        load_engine(SPEC, support.config(**fields)).initialize()


def test_tokens_beyond_vocabulary_are_refused() -> None:
    engine = load_engine(SPEC, support.config())
    engine.initialize()
    data = batch()
    data.input_ids[3] = TINY["vocab_size"]
    with pytest.raises(BatchError, match="token id 61 at position 3"):
        engine.forward(data, MicroBatchSpec(max_tokens=32))
    engine.destroy()


PACKAGES: list[tuple[str, str | None, type[CoreRLError], str]] = [
    ("mindspore", None, MissingPackage, r"mindspore is not installed: pip install 'mindspore==2\.10\.\*'"),
    ("numpy", "2.4.6", UnsupportedPackage, r"numpy 2\.4\.6 is installed.*pip install 'numpy>=1\.26,<2'"),
]


@pytest.mark.parametrize(("package", "version", "error", "says"), PACKAGES, ids=[row[0] for row in PACKAGES])
def test_packages_are_checked_before_imports(
    package: str, version: str | None, error: type[CoreRLError], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "_installed", lambda name: version if name == package else "1.26.4")
    with pytest.raises(error, match=says):
        packages.refuse_packages.__wrapped__("mindspore", SPEC.packages)


def test_spec_imports_neither_torch_nor_mindspore() -> None:
    code = "import sys, core_rl_mindspore; sys.exit('torch' in sys.modules or 'mindspore' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=dict(os.environ), check=False).returncode == 0
