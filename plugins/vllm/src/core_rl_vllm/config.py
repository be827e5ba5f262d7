"""The config of the vLLM engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from core_rl.servers.config import ServerEngineConfig, ServerOptions, is_loopback

PYTHON_VARIABLE = "CORE_RL_VLLM_PYTHON"


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
    accelerator; on a CPU they are 256 MiB."""

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
