"""The config of the engine."""

from __future__ import annotations

from pydantic import field_validator

from core_rl.servers.config import ServerEngineConfig, ServerOptions


class PlainOptions(ServerOptions):
    """Options of a server."""

    @field_validator("memory_fraction", "max_running_requests")
    @classmethod
    def _unsupported(cls, value: float | None) -> float | None:
        if value is not None:
            raise ValueError("a plain server has no such limit; remove the field")
        return value


class PlainConfig(ServerEngineConfig):
    """The common config, and the section of the servers."""

    product = "plain"  # in messages: "plain server 127.0.0.1:30000"
    module = "transformers"  # missing in the servers' Python: a ConfigError
    python_variable = "CORE_RL_PLAIN_PYTHON"

    options: PlainOptions = PlainOptions()
