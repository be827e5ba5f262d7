"""`VllmBackend`: an inference backend over a fleet of vLLM servers."""

from __future__ import annotations

from dataclasses import replace

from core_rl.servers.backend import ServerBackend
from core_rl.servers.model import ServedModel
from core_rl.servers.process import ServerProcess
from core_rl_vllm.adapters import VllmAdapterForm
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
        served, lora = ServedModel.of(config.model, "vllm"), config.model.lora
        if lora is None:
            return served
        return replace(served, adapter=VllmAdapterForm.of(lora, served.path, served.config))

    def start_server(
        self, config: VllmConfig, model: ServedModel, port: int, key: str | None
    ) -> ServerProcess:
        return start(config, model, port, key)
