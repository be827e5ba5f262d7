"""Model, directories and adapters (LoRA) that servers serve."""

from __future__ import annotations

import glob
import json
import math
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from uuid import uuid4

from torch import Tensor
from transformers import PretrainedConfig

from core_rl.backend.inference_backend import ModelLimits
from core_rl.backend.meta import WeightUpdateMeta
from core_rl.checkpoint.end_tokens import end_tokens
from core_rl.checkpoint.model_config import read_config
from core_rl.checkpoint.tensor_files import write_tensors
from core_rl.config.engine import LoraConfig, ModelConfig
from core_rl.errors import ConfigError
from core_rl.toolkit.meta_build import digest_of_directory
from core_rl.toolkit.model_files import exported_shapes

TAKEN = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"})
"""Last parts of the names of the layers that servers take adapters on."""


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """The model of a directory that servers read too."""

    path: Path
    limits: ModelLimits
    eos: frozenset[int]
    """End tokens of config, generation config and tokenizer."""
    shapes: dict[str, tuple[int, ...]]
    """Names and shapes of the tensors of an export."""
    config: PretrainedConfig
    adapter: AdapterForm | None = None
    """The form of adapters over it; None where servers take none."""

    @staticmethod
    def of(model: ModelConfig, engine: str) -> ServedModel:
        """Read the directory of ``model`` for ``engine``; raises `ConfigError` where there is none."""
        if model.path is None:
            raise ConfigError(
                f"the engine {engine!r} serves a model directory; set model.path instead of model.config"
            )
        config = read_config(model)
        path = Path(model.path).resolve()
        return ServedModel(
            path=path,
            limits=ModelLimits.of(config, model.vision),
            eos=frozenset(end_tokens(config, path)),
            shapes=exported_shapes(model),
            config=config,
        )

    @cached_property
    def digest(self) -> str:
        """The digest of its weights, as a train engine computes it for the base of an adapter."""
        return digest_of_directory(self.path, self.config)


@dataclass(frozen=True, kw_only=True)
class AdapterForm:
    """The adapters of one kind over one model: the trainer's factors, and files of servers, as ``peft`` has them."""

    lora: LoraConfig
    base: str
    """The directory of the model."""
    shapes: Mapping[str, tuple[int, ...]]
    """Names and shapes of the trainer's factors, as ``peft`` writes them."""

    @property
    def modules(self) -> list[str]:
        """Last parts of the names of the layers with an adapter on the server."""
        return sorted(adapted_modules(self.shapes))

    def write(self, factors: Mapping[str, Tensor], directory: Path) -> None:
        """Write ``adapter_model.safetensors`` and ``adapter_config.json``, as servers read them."""
        write_tensors(directory, "adapter_model", factors.items(), writes=True, max_file_bytes=1 << 62)
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.base,
            "r": self.lora.rank,
            # Not every server knows use_rslora: all of them divide by the rank.
            "lora_alpha": self.lora.alpha * (math.sqrt(self.lora.rank) if self.lora.rslora else 1),
            "target_modules": self.modules,
            "bias": "none",
        }
        (directory / "adapter_config.json").write_text(json.dumps(config))


def adapted_modules(names: Iterable[str]) -> set[str]:
    """Last parts of the names of the layers that the factors ``names`` belong to."""
    return {name.removesuffix(".weight").rpartition(".lora_")[0].rpartition(".")[2] for name in names}


def require_taken(names: Iterable[str], product: str) -> None:
    """Raise `ConfigError` for the factors ``names`` of layers on which servers of ``product`` take no adapter."""
    foreign = sorted(adapted_modules(names) - TAKEN)
    if foreign:
        raise ConfigError(
            f"model.lora: the adapter is on {', '.join(foreign)}, and {product} supports only "
            f"{', '.join(sorted(TAKEN))}; name some of these in target_modules, or sync by 'tensor', which sends "
            "weights with the adapter merged into them"
        )


class ServedDirectory:
    """A directory that servers read."""

    def __init__(self, directory: Path, *, temporary: bool) -> None:
        self.name = str(directory)
        """Path for servers: the directory, or a link to it where servers would read the path as a pattern."""
        self._removed = [directory] if temporary else []
        if glob.escape(self.name) != self.name:
            link = Path(tempfile.mkdtemp(prefix="core-rl-served-")) / "weights"
            link.symlink_to(directory)
            self.name = str(link)
            self._removed.append(link.parent)

    def discard(self) -> None:
        """Remove the link, and a temporary directory; no server will need them again."""
        for directory in self._removed:
            shutil.rmtree(directory, ignore_errors=True)


class ServedAdapter:
    """An adapter over the base weights of servers, or none: ``name`` is None then.

    A request keeps the adapter that it began with. A replaced adapter draws tokens of its own versions as
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
        """Unique name on servers; None without an adapter."""

    @staticmethod
    def written(form: AdapterForm, factors: Mapping[str, Tensor], meta: WeightUpdateMeta) -> ServedAdapter:
        """The adapter of ``factors``, in files next to the path of ``meta``."""
        file = Path(meta.path or "")
        directory = Path(tempfile.mkdtemp(prefix=f".{file.name}.adapter-", dir=file.parent))
        form.write(factors, directory)
        return ServedAdapter(meta.version, directory)

    def version_of(self, weight_version: int) -> int:
        """The version of a token that was drawn when the server reported ``weight_version``."""
        return weight_version if self.last_version is None else min(weight_version, self.last_version)

    def discard(self) -> None:
        """Remove its files; no server will need them again."""
        if self._directory is not None:
            self._directory.discard()
