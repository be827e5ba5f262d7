"""`VllmBackend`: an inference backend over a fleet of vLLM servers."""

from __future__ import annotations

from core_rl.servers.backend import ServerBackend
from core_rl.servers.model import ServedModel
from core_rl.servers.process import ServerProcess
from core_rl_vllm.config import VllmConfig
from core_rl_vllm.process import start
from core_rl_vllm.server import VllmServer
from core_rl_vllm.wire import VllmWire

__all__ = ["VllmBackend"]


class VllmBackend(ServerBackend[VllmConfig]):
    """Calls vLLM servers."""

    product = "vLLM"
    wire = VllmWire()
    server_class = VllmServer

    def served_model(self, config: VllmConfig) -> ServedModel:
        return ServedModel.of(config.model, "vllm")

    def start_server(
        self, config: VllmConfig, model: ServedModel, port: int, key: str | None
    ) -> ServerProcess:
        return start(config, model, port, key)
