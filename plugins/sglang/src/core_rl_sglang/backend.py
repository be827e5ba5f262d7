"""`SGLangBackend`: an inference backend over a fleet of SGLang servers."""

from __future__ import annotations

from core_rl.distributed.devices import device_type
from core_rl.servers.adapters import ServedModel
from core_rl.servers.backend import ServerBackend
from core_rl.servers.process import ServerProcess
from core_rl_sglang.config import SglangConfig
from core_rl_sglang.process import served_model, start
from core_rl_sglang.server import SGLangServer
from core_rl_sglang.wire import SglangWire


class SGLangBackend(ServerBackend[SglangConfig]):
    """Calls SGLang servers."""

    product = "SGLang"
    wire = SglangWire()
    server_class = SGLangServer

    def served_model(self, config: SglangConfig) -> ServedModel:
        on_cpu = device_type(config.device) == "cpu"
        return served_model(config.model, config.layout.tp if on_cpu else 0)

    def start_server(
        self, config: SglangConfig, model: ServedModel, port: int, key: str | None
    ) -> ServerProcess:
        return start(config, model, port, key)

    def release_memory(self) -> None:
        self.loop.wait(self.fleet.release_memory())

    def resume_memory(self) -> None:
        self.loop.wait(self.fleet.resume_memory())
