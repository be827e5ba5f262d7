"""The config of the vLLM engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Self

from pydantic import Field, model_validator

from core_rl.servers.config import ServerEngineConfig, ServerOptions, is_loopback

__all__ = ["PYTHON_VARIABLE", "VllmConfig", "VllmOptions"]

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

    @model_validator(mode="after")
    def _on_loopback(self) -> Self:
        if not is_loopback(self.host):
            raise ValueError(
                f"host = {self.host!r}: vLLM's key does not protect the routes that change weights; set host to "
                "127.0.0.1, or start servers in a network that others do not reach, and name them in addresses"
            )
        return self


class VllmConfig(ServerEngineConfig):
    """The common config and vLLM's own section.

    ``layout.dp`` is the number of servers.
    """

    product = "vLLM"
    module = "vllm"
    python_variable = PYTHON_VARIABLE

    options: VllmOptions = VllmOptions()
