"""`VllmBackend`: an inference backend over a fleet of vLLM servers."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor
from transformers import PretrainedConfig

from core_rl.backend.inference_backend import TopLogprobs
from core_rl.config.engine import LoraConfig
from core_rl.data.batch import SequenceBatch
from core_rl.distributed.devices import device_type
from core_rl.errors import ConfigError, UnsupportedCapability
from core_rl.servers.adapters import AdapterForm, ServedModel, require_taken
from core_rl.servers.backend import ServerBackend
from core_rl.servers.config import ServerEngineConfig, ServerOptions, is_loopback
from core_rl.servers.process import ServerProcess
from core_rl.toolkit.attention import head_size
from core_rl.toolkit.lora import adapter_shapes
from core_rl_vllm.server import TRANSFER, VllmServer
from core_rl_vllm.wire import VllmWire

PYTHON_VARIABLE = "CORE_RL_VLLM_PYTHON"
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The most that the rank of an adapter may be, of which a server is given one."""
HELD = 8
"""Adapters that a server holds: one for each version that a request in flight may have begun with."""
SCRIPT = Path(__file__).with_name("serve.py")
CPU_CACHE_BYTES = 2**28
CPU_BLOCK = 128
"""Tokens of a block of the cache on CPUs."""
CPU_HEAD_SIZES = frozenset({32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512})
"""Sizes of heads that vLLM's attention has on CPUs; with another one a server dies at its first request."""


class VllmOptions(ServerOptions):
    """Options of vLLM alone."""

    flags: ClassVar[Mapping[str, str]] = {
        "--api-key": "options.api_key",
        "--gpu-memory-utilization": "options.memory_fraction",
        "--host": "options.host",
        "--kv-cache-memory-bytes": "options.cache_bytes",
        "--max-num-seqs": "options.max_running_requests",
        "--port": "options.ports",
    }

    cache_bytes: int | None = Field(default=None, ge=1)
    """Bytes of the cache of keys and values of one launched server. By default vLLM decides by the memory of the
    accelerator; on a CPU they are 256 MiB, or what one sequence that fills the model's context takes."""

    private_network: bool = False
    """Whether every machine that reaches launched servers is trusted. Needed for servers that listen on another address
    than the loopback, also on the machines of a cluster: vLLM's key does not protect the routes that change weights."""

    def exposure(self, host: str) -> str | None:
        if not is_loopback(host) and not self.private_network:
            return (
                f"host = {host!r}: vLLM's key does not protect the routes that change weights; set host to 127.0.0.1, "
                "or private_network to true where only trusted machines reach it"
            )
        return super().exposure(host)


class VllmConfig(ServerEngineConfig):
    """The common config and vLLM's own section.

    ``layout.dp`` is the number of servers, and ``layout.tp`` that of the ranks of each.
    """

    product = "vLLM"
    module = "vllm"
    python_variable = PYTHON_VARIABLE

    options: VllmOptions = VllmOptions()


class VllmAdapterForm(AdapterForm):
    """The adapters of one kind over one model."""

    @staticmethod
    def of(lora: LoraConfig, path: Path, config: PretrainedConfig) -> VllmAdapterForm:
        """The form of ``lora`` over the model in ``path``; raises `ConfigError` for adapters vLLM does not take."""
        shapes = adapter_shapes(config, lora)
        require_taken(shapes, "vLLM")
        if lora.rank > RANKS[-1]:
            raise ConfigError(f"model.lora.rank = {lora.rank}, and vLLM takes {RANKS[-1]} at most")
        return VllmAdapterForm(lora=lora, base=str(path), shapes=shapes)

    def arguments(self) -> list[str]:
        """Command-line arguments of a server that loads such adapters."""
        most = min(rank for rank in RANKS if rank >= self.lora.rank)
        return ["--enable-lora", "--max-lora-rank", str(most), "--max-loras", str(HELD)]


class VllmBackend(ServerBackend[VllmConfig]):
    """Calls vLLM servers."""

    product = "vLLM"
    wire = VllmWire()
    server_class = VllmServer

    def served_model(self, config: VllmConfig) -> ServedModel:
        served, lora = ServedModel.of(config.model, "vllm"), config.model.lora
        if lora is None:
            return served
        return replace(served, adapter=VllmAdapterForm.of(lora, served.path, served.config))

    def start_server(
        self, config: VllmConfig, model: ServedModel, port: int, key: str | None
    ) -> ServerProcess:
        device = device_type(config.device)
        environment = {
            "VLLM_SERVER_DEV_MODE": "1",  # the routes of weights
            "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            # The client closes idle connections; a server that does would lose a request on its way.
            "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "3600",
            "VLLM_NO_USAGE_STATS": "1",
            # The sampler of core-rl-vllm-server is of this model runner, which CPUs use by default.
            "VLLM_USE_V2_MODEL_RUNNER": "0",
            "HF_HUB_OFFLINE": "1",
        }
        if device == "cpu":
            require_cpu_heads(model.config)
            # Compiling one kernel of the sampler takes longer than it will ever save.
            environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}
        else:
            every = ",".join(map(str, range(torch.cuda.device_count())))
            names = os.environ.get("CUDA_VISIBLE_DEVICES", every).split(",")
            environment["CUDA_VISIBLE_DEVICES"] = visible_devices(config.devices, names)
        arguments = arguments_of(config, model, port, device)
        return ServerProcess(
            config,
            port,
            key,
            script=SCRIPT,
            arguments=arguments,
            environment=environment,
            gpus=range(config.layout.tp),
        )

    def score(self, batch: SequenceBatch, temperature: float) -> Tensor:
        self._require_prompt_logprobs()
        return super().score(batch, temperature)

    def top_logprobs(self, batch: SequenceBatch, k: int, temperature: float) -> TopLogprobs:
        self._require_prompt_logprobs()
        return super().top_logprobs(batch, k, temperature)

    def _require_prompt_logprobs(self) -> None:
        """Raise `UnsupportedCapability` where a server would die: https://github.com/vllm-project/vllm/issues/16668."""
        if self.model.adapter is not None and self.servers[0].device == "cpu":
            raise UnsupportedCapability(
                "model.lora is set: on a CPU, a vLLM server with --enable-lora dies when it computes log-probs of "
                "given tokens (vLLM #16668); use the train engine's forward(), or an engine without model.lora"
            )


def require_cpu_heads(config: PretrainedConfig) -> None:
    """Raise `ConfigError` for a model whose heads are too small or too large for vLLM's attention on CPUs."""
    text = config.get_text_config()
    size = head_size(text)
    if size not in CPU_HEAD_SIZES and not hasattr(
        text, "kv_lora_rank"
    ):  # latent attention has a kernel of its own
        raise ConfigError(
            f"head_dim = {size} in the model's config.json: vLLM's attention on CPUs has heads of "
            f"{', '.join(map(str, sorted(CPU_HEAD_SIZES)))}; set device to cuda, or take another model"
        )


def cpu_cache_bytes(config: PretrainedConfig, context_length: int, itemsize: int) -> int:
    """Bytes of a cache on a CPU: vLLM does not start with less than a sequence of ``context_length`` tokens takes."""
    text = config.get_text_config()
    heads: int = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    token: int = 2 * text.num_hidden_layers * heads * head_size(text) * itemsize
    return max(CPU_CACHE_BYTES, (context_length // CPU_BLOCK + 2) * CPU_BLOCK * token)


def visible_devices(devices: Sequence[int], names: Sequence[str]) -> str:
    """``CUDA_VISIBLE_DEVICES`` of a server on ``devices`` of the GPUs ``names``: vLLM's ranks take the first ones.

    The others follow: ranks open a trainer's memory there. Raises `ConfigError` for a GPU that does not exist.
    """
    if absent := [device for device in devices if device >= len(names)]:
        raise ConfigError(f"devices = {list(devices)}: there are {len(names)} GPUs, and no {absent}")
    others = [name for number, name in enumerate(names) if number not in devices]
    return ",".join([*(names[device] for device in devices), *others])


def arguments_of(config: VllmConfig, model: ServedModel, port: int, device: str) -> list[str]:
    """The command-line arguments of a server of ``model`` for its `VllmConfig.of_server`, without the API key."""
    context_length, options = model.limits.context_length, config.options
    cache, on_cpu = options.cache_bytes, device == "cpu"
    if cache is None and on_cpu:
        cache = cpu_cache_bytes(model.config, context_length or 0, getattr(torch, config.dtype).itemsize)
    values = {
        "--model": model.path,
        "--host": options.host,
        "--port": port,
        "--dtype": config.dtype,
        "--tensor-parallel-size": config.layout.tp,
        "--seed": config.seed,
        "--max-num-seqs": options.max_running_requests,
        "--gpu-memory-utilization": options.memory_fraction,
        "--kv-cache-memory-bytes": cache,
        # A sequence that fills the context is scored as a prompt, after which vLLM draws a token.
        "--max-model-len": None if context_length is None else context_length + 1,
        "--logprobs-mode": "processed_logprobs",
        "--max-logprobs": -1,
        # Requests name all parameters, and end-of-sequence tokens.
        "--generation-config": "vllm",
        "--weight-transfer-config": json.dumps(TRANSFER),
    }
    arguments = [part for name, value in values.items() if value is not None for part in (name, str(value))]
    # Requests and responses are token ids.
    arguments += ["--enable-scale-out", "--skip-tokenizer-init", "--disable-log-stats"]
    if isinstance(model.adapter, VllmAdapterForm):
        arguments += model.adapter.arguments()
    return [*arguments, *(["--enforce-eager"] if on_cpu else []), *options.extra_args]
