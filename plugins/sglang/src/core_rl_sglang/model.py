"""The model that SGLang servers serve."""

from __future__ import annotations

from dataclasses import replace

from core_rl.config.engine import ModelConfig
from core_rl.servers.model import ServedModel
from core_rl_sglang.adapters import SglangAdapterForm

__all__ = ["served_model"]


def served_model(model: ModelConfig, cpu_ranks: int = 0) -> ServedModel:
    """The model in the directory of ``model``, and the form of its adapters; raises `ConfigError`.

    ``cpu_ranks`` are those of a server on a CPU, and 0 elsewhere.
    """
    served = ServedModel.of(model, "sglang")
    if model.lora is None:
        return served
    form = SglangAdapterForm.of(model.lora, served.path, served.config, served.shapes, cpu_ranks)
    return replace(served, adapter=form)
