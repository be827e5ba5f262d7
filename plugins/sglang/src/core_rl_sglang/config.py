"""The config of the SGLang engine."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import ClassVar, Self

from pydantic import Field, model_validator

from core_rl.errors import ConfigError
from core_rl.servers.config import ServerEngineConfig, ServerOptions

PYTHON_VARIABLE = "CORE_RL_SGLANG_PYTHON"


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
