"""Adapters (LoRA) in SGLang's format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig

from core_rl.config.engine import LoraConfig
from core_rl.servers.adapters import AdapterForm, adapted_modules, require_taken
from core_rl.toolkit.lora import ADAPTER_PREFIX, adapter_shapes

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that SGLang fuses. It ignores adapters that lack the first of them (0.5.23, ``lora.py``)."""
CPU_MULTIPLE = 32
"""On a CPU, SGLang pads the inner size of an MLP to a multiple of this (0.5.23, ``update_config.py``), and its
scheduler dies of an adapter without the padding."""
A, B = ".lora_A.weight", ".lora_B.weight"


@dataclass(frozen=True, kw_only=True)
class SglangAdapterForm(AdapterForm):
    """The adapters of one kind over one model: the trainer's factors, and SGLang's files."""

    absent: Mapping[str, tuple[int, ...]]
    """Names and shapes of further factors that SGLang needs, which are 0."""
    multiple: int
    """Inner sizes of MLPs are multiples of this on the server."""

    @staticmethod
    def of(
        lora: LoraConfig,
        path: Path,
        config: PretrainedConfig,
        weights: Mapping[str, tuple[int, ...]],
        cpu_ranks: int,
    ) -> SglangAdapterForm:
        """The form of ``lora`` over the model in ``path``, whose weights have these shapes.

        ``cpu_ranks`` are those of a server on a CPU, and 0 elsewhere. Raises `ConfigError` for target modules that
        SGLang does not support.
        """
        shapes = adapter_shapes(config, lora)
        require_taken(shapes, "SGLang")
        return SglangAdapterForm(
            lora=lora,
            base=str(path),
            shapes=shapes,
            absent=dict(_absent(shapes, weights)),
            multiple=max(1, CPU_MULTIPLE * cpu_ranks),
        )

    @property
    def modules(self) -> list[str]:
        return sorted(adapted_modules((*self.shapes, *self.absent)))

    def arguments(self, device: str) -> list[str]:
        """Command-line arguments of a server on ``device`` that loads such adapters."""
        backend = ["--lora-backend", "torch_native"] if device == "cpu" else []
        rank = ["--max-lora-rank", str(self.lora.rank)]
        return ["--enable-lora", *rank, "--lora-target-modules", *self.modules, *backend]

    def write(self, factors: Mapping[str, Tensor], directory: Path) -> None:
        tensors = {**factors, **{name: torch.zeros(shape) for name, shape in self.absent.items()}}
        super().write({name: self._padded(name, value) for name, value in tensors.items()}, directory)

    def _padded(self, name: str, factor: Tensor) -> Tensor:
        if name.endswith(f".down_proj{A}"):
            return F.pad(factor, (0, -factor.shape[1] % self.multiple))
        if name.endswith((f".gate_proj{B}", f".up_proj{B}")):
            return F.pad(factor, (0, 0, 0, -factor.shape[0] % self.multiple))
        return factor


def _absent(
    shapes: Mapping[str, tuple[int, ...]], weights: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Factors of layers that SGLang fuses with adapted ones, and that have none themselves."""
    layers = {name.removesuffix(A): shape for name, shape in shapes.items() if name.endswith(A)}
    for layer, (rank, into) in layers.items():
        block, _, module = layer.rpartition(".")
        for mate in (mate for fused in FUSED if module in fused for mate in fused):
            sibling = f"{block}.{mate}"
            if sibling not in layers:
                yield sibling + A, (rank, into)
                yield sibling + B, (weights[f"{sibling.removeprefix(ADAPTER_PREFIX)}.weight"][0], rank)
