"""Adapters for the tiny models that expose bugs: they change every output, and no two of their sizes are equal.

Written to a directory as ``peft`` writes them, without ``peft``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from core_rl_conformance.inputs.tiny_models import TinyModel, build
from core_rl_oracle.experts import name_in_files
from core_rl_oracle.low_rank import LowRank, linear_layers

PREFIX = "base_model.model."
"""Prefix of ``peft`` for the names of an adapter's tensors."""
STRENGTH = 0.3
"""Size of the adapter's product, relative to the weight."""


@dataclass(frozen=True, kw_only=True)
class TinyAdapter:
    """One adapter of one tiny model; equal fields give bitwise equal factors."""

    model: TinyModel
    rank: int = 3
    alpha: int = 7
    rslora: bool = False
    some: bool = False
    """On every second kind of layer; otherwise on all of the trunk's."""
    seed: int = 0
    strength: float = STRENGTH
    """Size of the product, which the factors B alone have."""

    @property
    def scaling(self) -> float:
        """The factor of the product."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def section(self) -> dict[str, Any]:
        """The section ``model.lora`` of an engine's config."""
        targets = {"target_modules": self._targets()} if self.some else {}
        return {"rank": self.rank, "alpha": self.alpha, "rslora": self.rslora, **targets}

    def low_rank(self) -> LowRank:
        """The factors in float32."""
        linear = self._layers()
        kinds = self._kinds(linear)
        layers = {name: sizes for name, sizes in linear.items() if name.rpartition(".")[2] in kinds}
        random = torch.Generator().manual_seed(7919 * self.model.seed + self.seed)
        factors = {}
        for name, (out, into, _) in layers.items():
            down = torch.randn(self.rank, into, generator=random)
            factors[f"{name}.lora_A.weight"] = down / math.sqrt(into)
            size = self.strength / (self.scaling * math.sqrt(self.rank))
            factors[f"{name}.lora_B.weight"] = size * torch.randn(out, self.rank, generator=random)
        transposed = frozenset(name for name, (_, _, turned) in layers.items() if turned)
        kind = self.model.config().model_type
        weights = {name: name_in_files(kind, f"{name}.weight") for name in layers}
        return LowRank(factors=factors, scaling=self.scaling, transposed=transposed, weights=weights)

    def write(self, path: Path) -> Path:
        """The directory ``path``, with the adapter in it."""
        path.mkdir(parents=True)
        tensors = {PREFIX + name: value for name, value in self.low_rank().factors.items()}
        if self.model.head != "lm":
            tensors[f"{PREFIX}score.weight"] = build(self.model).get_parameter("score.weight").detach()
        save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM" if self.model.head == "lm" else "SEQ_CLS",
            "base_model_name_or_path": "a/model-hub-name",
            "r": self.rank,
            "lora_alpha": self.alpha,
            "use_rslora": self.rslora,
            "target_modules": self._targets(),
            "bias": "none",
        }
        (path / "adapter_config.json").write_text(json.dumps(config))
        return path

    def _targets(self) -> list[str]:
        """Last parts of names; whole names where layers of a vision tower may be called the same."""
        layers = self._layers()
        kinds = self._kinds(layers)
        return [name for name in layers if name.rpartition(".")[2] in kinds] if self.model.vision else kinds

    def _kinds(self, layers: Iterable[str]) -> list[str]:
        kinds = sorted({name.rpartition(".")[2] for name in layers})
        return kinds[::2] if self.some else kinds

    def _layers(self) -> dict[str, tuple[int, int, bool]]:
        model = build(self.model)
        return linear_layers(model, getattr(model.base_model, "language_model", model.base_model))
