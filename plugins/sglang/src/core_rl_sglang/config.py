"""The config of the SGLang engine."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import ClassVar, Self

from pydantic import Field, model_validator

from core_rl.errors import ConfigError
from core_rl.servers.config import ServerEngineConfig, ServerOptions

__all__ = ["PYTHON_VARIABLE", "SglangConfig", "SglangOptions"]

PYTHON_VARIABLE = "CORE_RL_SGLANG_PYTHON"


def _on_cuda(device: str) -> bool:
    if device == "cpu":
        return False
    from core_rl.distributed.devices import (
        device_type,  # torch, which a config that shares nothing does not need
    )

    return device_type(device) == "cuda"


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
    def _leaves_memory(self) -> Self:
        launches = not self.options.addresses
        if (
            launches
            and self.shares_devices
            and self.options.memory_fraction is None
            and _on_cuda(self.device)
        ):
            raise ValueError(
                f"a server on the devices {list(self.own_devices)}, which other engines share, would take their "
                "memory; set options.memory_fraction, for example to 0.4, or give it devices of its own"
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

    def on_machine(self, number: int, devices: tuple[int, ...], host: str) -> Self:
        """As `with_devices`, for a server on the machine that others reach at ``host``. Needs ``options.api_key``."""
        if self.options.api_key is None:
            raise ConfigError(
                f"a server on {host} without options.api_key: whoever reaches a server can run code on it, since it "
                "unpickles the tensors of weight updates; set options.api_key to '${env:NAME}'"
            )
        options = self.options.model_copy(update={"host": host})
        return self.with_devices(number, devices).model_copy(update={"options": options})
