"""The backend over servers."""

from __future__ import annotations

from pathlib import Path

from core_rl.distributed.devices import device_type
from core_rl.servers.adapters import ServedModel
from core_rl.servers.backend import ServerBackend
from core_rl.servers.process import ServerProcess
from core_rl_plain.config import PlainConfig
from core_rl_plain.server import PlainServer
from core_rl_plain.wire import PlainWire

SCRIPT = Path(__file__).with_name("serve.py")


class PlainBackend(ServerBackend[PlainConfig]):
    """Calls servers."""

    product = "plain"
    wire = PlainWire()
    server_class = PlainServer

    def served_model(self, config: PlainConfig) -> ServedModel:
        return ServedModel.of(config.model, "plain")

    def start_server(
        self, config: PlainConfig, model: ServedModel, port: int, key: str | None
    ) -> ServerProcess:
        device, options = device_type(config.device), config.options
        values = {
            "--model": model.path,
            "--host": options.host,
            "--port": port,
            "--dtype": config.dtype,
            "--device": device,
            "--seed": config.seed,
        }
        arguments = [str(part) for item in values.items() for part in item]
        arguments += options.extra_args
        environment = {"HF_HUB_OFFLINE": "1"}
        if device == "cuda":
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, config.devices))
        return ServerProcess(config, port, key, script=SCRIPT, arguments=arguments, environment=environment)
