"""Adapters (LoRA) in SGLang's format, and the adapter that serves a request."""

from __future__ import annotations

import glob
import json
import math
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig

from core_rl.checkpoint.tensor_files import write_tensors
from core_rl.config.engine import LoraConfig
from core_rl.errors import ConfigError
from core_rl.toolkit.lora import ADAPTER_PREFIX, adapter_shapes

__all__ = ["AdapterForm", "ServedAdapter", "ServedDirectory"]

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that SGLang fuses. It ignores adapters that lack the first of them (0.5.23, ``lora.py``)."""
TAKEN = frozenset({*FUSED[0], *FUSED[1], "o_proj", "down_proj"})
CPU_MULTIPLE = 32
"""On a CPU, SGLang pads the inner size of an MLP to a multiple of this (0.5.23, ``update_config.py``), and its
scheduler dies of an adapter without the padding."""
A, B = ".lora_A.weight", ".lora_B.weight"


@dataclass(frozen=True, kw_only=True)
class AdapterForm:
    """The adapters of one kind over one model: the trainer's factors, and SGLang's files."""

    lora: LoraConfig
    base: str
    shapes: Mapping[str, tuple[int, ...]]
    """Names and shapes of the trainer's factors, as ``peft`` writes them."""
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
    ) -> AdapterForm:
        """The form of ``lora`` over the model in ``path``, whose weights have these shapes.

        ``cpu_ranks`` are those of a server on a CPU, and 0 elsewhere. Raises `ConfigError` for target modules that
        SGLang does not support.
        """
        shapes = adapter_shapes(config, lora)
        foreign = sorted({_module(name) for name in shapes} - TAKEN)
        if foreign:
            raise ConfigError(
                f"model.lora: the adapter is on {', '.join(foreign)}, and SGLang supports those of "
                f"{', '.join(sorted(TAKEN))}; name some of these in target_modules, or sync by 'tensor', which sends "
                "weights with the adapter merged into them"
            )
        return AdapterForm(
            lora=lora,
            base=str(path),
            shapes=shapes,
            absent=dict(_absent(shapes, weights)),
            multiple=max(1, CPU_MULTIPLE * cpu_ranks),
        )

    @property
    def modules(self) -> list[str]:
        """Last parts of the names of the layers with an adapter on the server."""
        return sorted({_module(name) for name in (*self.shapes, *self.absent)})

    def arguments(self, device: str) -> list[str]:
        """Command-line arguments of a server on ``device`` that loads such adapters."""
        backend = ["--lora-backend", "torch_native"] if device == "cpu" else []
        rank = ["--max-lora-rank", str(self.lora.rank)]
        return ["--enable-lora", *rank, "--lora-target-modules", *self.modules, *backend]

    def write(self, factors: Mapping[str, Tensor], directory: Path) -> None:
        """Write ``adapter_model.safetensors`` and ``adapter_config.json``, as SGLang reads them."""
        whole = {**factors, **{name: torch.zeros(shape) for name, shape in self.absent.items()}}
        stream = ((name, self._padded(name, value)) for name, value in whole.items())
        write_tensors(directory, "adapter_model", stream, writes=True, max_file_bytes=1 << 62)
        # SGLang divides by the rank, whatever use_rslora says.
        alpha = self.lora.alpha * (math.sqrt(self.lora.rank) if self.lora.rslora else 1)
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.base,
            "r": self.lora.rank,
            "lora_alpha": alpha,
            "target_modules": self.modules,
            "bias": "none",
        }
        (directory / "adapter_config.json").write_text(json.dumps(config))

    def _padded(self, name: str, factor: Tensor) -> Tensor:
        if name.endswith(f".down_proj{A}"):
            return F.pad(factor, (0, -factor.shape[1] % self.multiple))
        if name.endswith((f".gate_proj{B}", f".up_proj{B}")):
            return F.pad(factor, (0, 0, 0, -factor.shape[0] % self.multiple))
        return factor


def _module(name: str) -> str:
    return name.removesuffix(A).removesuffix(B).rpartition(".")[2]


def _absent(
    shapes: Mapping[str, tuple[int, ...]], weights: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Factors of layers that SGLang fuses with adapted ones, and that have none themselves."""
    layers = {name.removesuffix(A): shape for name, shape in shapes.items() if name.endswith(A)}
    for layer, (rank, into) in layers.items():
        block, _, module = layer.rpartition(".")
        for mate in (mate for fused in FUSED if module in fused for mate in fused):
            other = f"{block}.{mate}"
            if other not in layers:
                yield other + A, (rank, into)
                yield other + B, (weights[f"{other.removeprefix(ADAPTER_PREFIX)}.weight"][0], rank)


class ServedDirectory:
    """A directory that servers read."""

    def __init__(self, directory: Path, *, temporary: bool) -> None:
        self.name = str(directory)
        """Its name, or that of a link to it where SGLang (0.5.23) would take the name for a pattern."""
        self._removed = [directory] if temporary else []
        if glob.escape(self.name) != self.name:
            link = Path(tempfile.mkdtemp(prefix="core-rl-sglang-")) / "weights"
            link.symlink_to(directory)
            self.name = str(link)
            self._removed.append(link.parent)

    def discard(self) -> None:
        """Remove the link, and a temporary directory; no server will need them again."""
        for directory in self._removed:
            shutil.rmtree(directory, ignore_errors=True)


class ServedAdapter:
    """An adapter over the base weights of servers, or none: ``name`` is None then.

    A request keeps the adapter that it began with. One that has been replaced draws tokens of its own versions as
    long as such requests last, whatever version the server reports by then.
    """

    def __init__(self, version: int, directory: Path | None = None) -> None:
        self.version = version
        self.last_version: int | None = None
        """The last version of its tokens, once it has been replaced."""
        self.in_flight = 0
        """Requests that use it."""
        self._directory = None if directory is None else ServedDirectory(directory, temporary=True)
        self.path = "" if self._directory is None else self._directory.name
        """The directory that servers load it from."""
        self.name = None if directory is None else f"core-rl-{uuid4().hex}"
        """Its name on servers; no two adapters of any engines share one."""

    @property
    def fields(self) -> dict[str, str]:
        """The fields of a request that uses it."""
        return {} if self.name is None else {"lora_path": self.name}

    def version_of(self, weight_version: int) -> int:
        """The version of a token that was drawn when the server reported ``weight_version``."""
        return weight_version if self.last_version is None else min(weight_version, self.last_version)

    def discard(self) -> None:
        """Remove its files; no server will need them again."""
        if self._directory is not None:
            self._directory.discard()
