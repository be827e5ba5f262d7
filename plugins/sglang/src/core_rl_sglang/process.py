"""Config, model and process of SGLang servers."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor
from transformers import PretrainedConfig

from core_rl.config.engine import LoraConfig, ModelConfig
from core_rl.distributed.devices import device_type
from core_rl.errors import ConfigError, UnsupportedCapability
from core_rl.servers.adapters import AdapterForm, ServedModel, adapted_modules, require_taken
from core_rl.servers.config import ServerEngineConfig, ServerOptions
from core_rl.servers.process import ServerProcess
from core_rl.toolkit.lora import ADAPTER_PREFIX, adapter_shapes
from core_rl_sglang.serve import SERVES_IMAGES

PYTHON_VARIABLE = "CORE_RL_SGLANG_PYTHON"
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that SGLang fuses. It ignores adapters that lack the first of them (0.5.23, ``lora.py``)."""
CPU_MULTIPLE = 32
"""On a CPU, SGLang pads the inner size of an MLP to a multiple of this (0.5.23, ``update_config.py``), and its
scheduler dies of an adapter without the padding."""
A, B = ".lora_A.weight", ".lora_B.weight"
SCRIPT = Path(__file__).with_name("serve.py")
CPU_CACHE_TOKENS = 16384
IMAGE_MODELS = ("qwen3_vl",)
"""Model types whose images the conformance suite compares. The feature of a Qwen2.5-VL with other patches than 14 by 14
pixels is the patch itself (0.5.23, ``qwen2_5_vl.py``), and Qwen3.5 needs SGLang's kernels for CPUs."""
CONTEXT_MARGIN = 8
"""SGLang keeps some tokens of its context for itself: a prompt is at most 7 shorter (0.5.23, ``tp_worker.py``)."""


class SglangOptions(ServerOptions):
    """Options of SGLang alone."""

    flags: ClassVar[Mapping[str, str]] = {
        "--api-key": "options.api_key",
        "--admin-api-key": "options.api_key",
        "--host": "options.host",
        "--base-gpu-id": "devices",
        "--gpu-id-step": "devices",
        "--mem-fraction-static": "options.memory_fraction",
        "--port": "options.ports",
    }

    max_total_tokens: int | None = Field(default=None, ge=1)
    """Tokens whose keys and values fit into the cache of one launched server. By default SGLang decides by the
    memory of the accelerator; on a CPU it is 16,384."""


class SglangConfig(ServerEngineConfig):
    """The common config and SGLang's own section.

    ``layout.dp`` is the number of servers, and ``layout.tp`` that of the ranks of each.
    """

    product = "SGLang"
    module = "sglang"
    python_variable = PYTHON_VARIABLE

    options: SglangOptions = SglangOptions()

    @model_validator(mode="after")
    def _launches_for_images(self) -> Self:
        if self.model.vision and self.options.addresses:
            raise ValueError(
                "options.addresses with model.vision: /generate of a server that others have started takes images as "
                "files and URLs, and no tensors of a processor (SGLang 0.5.23, api_contract.py); leave addresses out, "
                "so that the engine launches its servers, or take the engine 'reference-rollout'"
            )
        return self

    def with_devices(self, number: int, devices: tuple[int, ...]) -> Self:
        """As the base class; also raises `ConfigError` for devices at unequal distances, which SGLang cannot name."""
        steps = {second - first for first, second in pairwise(devices)}
        if len(steps) > 1 or min(steps, default=1) < 1:
            raise ConfigError(
                f"devices = {list(self.devices)}: server {number} gets {list(devices)} for {self.layout.tp} ranks; "
                "SGLang takes devices that rise in equal steps, such as [2, 3]"
            )
        return super().with_devices(number, devices)


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
        for name, factor in tensors.items():
            if name.endswith(f".down_proj{A}"):
                tensors[name] = F.pad(factor, (0, -factor.shape[1] % self.multiple))
            elif name.endswith((f".gate_proj{B}", f".up_proj{B}")):
                tensors[name] = F.pad(factor, (0, 0, 0, -factor.shape[0] % self.multiple))
        super().write(tensors, directory)


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


def start(config: SglangConfig, model: ServedModel, port: int, key: str | None) -> ServerProcess:
    """Start a server of ``model`` for its `SglangConfig.of_server`; ``key`` is the API key, or None."""
    device = device_type(config.device)
    environment = {
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        # The client closes idle connections; a server that does would lose a request on its way.
        "SGLANG_TIMEOUT_KEEP_ALIVE": "3600",
    }
    if config.model.vision:
        environment[SERVES_IMAGES] = "1"
        # SGLang keeps features of images, also of a tower that was trained since (0.5.23, ``flush_cache``).
        environment["SGLANG_VLM_CACHE_SIZE_MB"] = "0"
    if device == "cpu":
        environment["SGLANG_USE_CPU_ENGINE"] = "1"
        if config.layout.tp > 1 and "SGLANG_CPU_OMP_THREADS_BIND" not in os.environ:
            environment["SGLANG_CPU_OMP_THREADS_BIND"] = _shared_cores(config.layout.tp)
    arguments = arguments_of(config, model, port, device)
    return ServerProcess(config, port, key, script=SCRIPT, arguments=arguments, environment=environment)


def arguments_of(config: SglangConfig, model: ServedModel, port: int, device: str) -> list[str]:
    """The command-line arguments of a server of ``model`` for its `SglangConfig.of_server`, without the API key.

    Raises `ConfigError` for a model path that SGLang cannot read.
    """
    if glob.escape(str(model.path)) != str(model.path):
        raise ConfigError(
            f"model.path = {str(model.path)!r}: SGLang (0.5.23) reads it as a pattern; rename the directory, "
            "or give it another name with a link"
        )
    context_length, options = model.limits.context_length, config.options
    values: dict[str, object] = {
        "--model-path": model.path,
        "--host": options.host,
        "--port": port,
        "--device": device,
        "--dtype": config.dtype,
        "--tp-size": config.layout.tp,
        "--random-seed": config.seed,
        "--max-total-tokens": options.max_total_tokens or (CPU_CACHE_TOKENS if device == "cpu" else None),
        "--max-running-requests": options.max_running_requests,
        "--context-length": None if context_length is None else context_length + CONTEXT_MARGIN,
    }
    if device == "cuda":
        first, *rest = config.devices  # of this server alone, in equal steps
        steps = {"--base-gpu-id": first, "--gpu-id-step": rest[0] - first if rest else None}
        values |= {**steps, "--mem-fraction-static": options.memory_fraction}
    arguments = [part for name, value in values.items() if value is not None for part in (name, str(value))]
    # Requests and responses are token ids, and the first requests are the warm-up.
    arguments += ["--skip-tokenizer-init", "--skip-server-warmup"]
    if device == "cpu":
        # A fused kernel is not in SGLang's wheel. An idle server leaves the cores to the trainer.
        arguments += ["--attention-backend", "torch_native", "--sleep-on-idle"]
    else:
        arguments.append("--enable-memory-saver")  # without it, release_memory() would free nothing
    if isinstance(model.adapter, SglangAdapterForm):
        arguments += model.adapter.arguments(device)
    return [*arguments, *options.extra_args]


def _shared_cores(ranks: int) -> str:
    """The cores of each rank of a server: by default SGLang binds each to a NUMA node, and fails with fewer nodes."""
    cores = sorted(os.sched_getaffinity(0))
    shares = [cores[rank * len(cores) // ranks : (rank + 1) * len(cores) // ranks] for rank in range(ranks)]
    return "|".join(",".join(map(str, share or cores[:1])) for share in shares)


def served_model(model: ModelConfig, cpu_ranks: int = 0) -> ServedModel:
    """The model in the directory of ``model``, and the form of its adapters; raises `ConfigError`.

    ``cpu_ranks`` are those of a server on a CPU, and 0 elsewhere.
    """
    served = ServedModel.of(model, "sglang")
    if model.vision:
        config = served.config
        if config.model_type not in IMAGE_MODELS:
            raise UnsupportedCapability(
                f"model.vision with the model type {config.model_type!r}: images through SGLang servers are for "
                f"{', '.join(IMAGE_MODELS)}; take the engine 'reference-rollout'"
            )
    if model.lora is None:
        return served
    form = SglangAdapterForm.of(model.lora, served.path, served.config, served.shapes, cpu_ranks)
    return replace(served, adapter=form)
