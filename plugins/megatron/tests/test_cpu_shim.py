"""The shim reaches Megatron's modules and nothing else."""

from __future__ import annotations

import importlib

import pytest
import torch

from core_rl.errors import ConfigError
from core_rl_megatron import cpu_shim

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is replaced where there is CUDA")


def test_only_megatron_sees_the_cpu_shim() -> None:
    cpu_shim.install(torch.device("cpu"))
    cpu_shim.install(torch.device("cpu"))
    for name in cpu_shim.SITES:
        seen = importlib.import_module(f"megatron.core.{name}").__dict__["torch"]
        assert seen.cuda.current_device() == torch.device("cpu")
        assert seen.zeros([], dtype=torch.int, device="cuda").device.type == "cpu"
        assert seen.Tensor is torch.Tensor
    with pytest.raises((AssertionError, RuntimeError)):
        torch.cuda.current_device()
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")


def test_cuda_types_last_while_building() -> None:
    tensor = torch.zeros(1)
    with cpu_shim.building():
        assert tensor.type() == "torch.cuda.FloatTensor"
        assert tensor.cuda() is tensor
        assert tensor.type(torch.float64).dtype == torch.float64
    assert tensor.type() == "torch.FloatTensor"


def test_a_machine_with_cuda_keeps_its_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("megatron.core.utils")
    monkeypatch.setitem(module.__dict__, "torch", torch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    cpu_shim.install(torch.device("cuda"))
    assert module.__dict__["torch"] is torch
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES=''"):
        cpu_shim.install(torch.device("cpu"))


def test_fused_functions_are_not_compiled_on_the_cpu() -> None:
    """Each would take seconds of a compiler."""
    cpu_shim.install(torch.device("cpu"))
    fusions = importlib.import_module("megatron.core.fusions.fused_bias_swiglu")
    for name in ("swiglu", "swiglu_back", "weighted_swiglu", "weighted_swiglu_back"):
        assert not hasattr(getattr(fusions, name), "_torchdynamo_orig_callable")
