"""The config of the SGLang engine."""

from __future__ import annotations

import ipaddress
import os
import sys
from itertools import pairwise
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from core_rl.config.base import Config
from core_rl.config.engine import InferenceEngineConfig
from core_rl.config.secret import SecretReference
from core_rl.errors import ConfigError

__all__ = ["PYTHON_VARIABLE", "SglangConfig", "SglangOptions"]

PYTHON_VARIABLE = "CORE_RL_SGLANG_PYTHON"
HAVE_FIELDS = {
    "--api-key": "options.api_key",
    "--admin-api-key": "options.api_key",
    "--host": "options.host",
    "--base-gpu-id": "devices",
    "--gpu-id-step": "devices",
    "--mem-fraction-static": "options.memory_fraction",
    "--port": "options.ports",
}
"""Arguments of a server whose fields are checked."""


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _on_cuda(device: str) -> bool:
    if device == "cpu":
        return False
    from core_rl.distributed.devices import (
        device_type,  # torch, which a config that shares nothing does not need
    )

    return device_type(device) == "cuda"


class SglangOptions(Config):
    """Options of SGLang alone."""

    addresses: tuple[str, ...] = ()
    """Servers that run already, as ``host:port``; they serve ``model.path``, or load its weights when the engine
    connects. Without any, the engine launches ``layout.dp`` servers of its own."""
    python: str | None = None
    """The Python of the environment that SGLang is installed in. By default what the environment variable
    CORE_RL_SGLANG_PYTHON names, and else the Python of this process."""
    host: str = "127.0.0.1"
    """The address that launched servers listen on. Another one than the loopback needs ``api_key``: whoever reaches a
    server without a key can run code on it, since it unpickles the tensors of weight updates."""
    ports: tuple[int, ...] = ()
    """The ports of launched servers; by default any free ones."""
    api_key: SecretReference | None = None
    """The key that servers require of clients, launched ones and those that run already: ``${env:NAME}`` with the name
    of the environment variable that holds it, never the key itself."""
    max_total_tokens: int | None = Field(default=None, ge=1)
    """Tokens whose keys and values fit into the cache of one launched server. By default SGLang decides by the
    memory of the accelerator; on a CPU it is 16,384."""
    memory_fraction: float | None = Field(default=None, gt=0.0, lt=1.0)
    """The part of an accelerator's memory that a launched server takes for weights and cache; by default SGLang
    decides, as if nobody else used it. Needed where an engine that trains is on the same accelerator."""
    max_running_requests: int | None = Field(default=None, ge=1)
    """Requests that one launched server computes at one time; by default SGLang decides."""
    extra_args: tuple[str, ...] = ()
    """Further arguments of ``sglang.launch_server``, such as ``--chunked-prefill-size 4096``; those that have a field
    are refused."""
    log_path: str | None = None
    """A directory for the logs of launched servers; by default they are kept until the engine is destroyed."""
    start_timeout_s: float = Field(default=900.0, gt=0)
    """Time limit for a server to become ready, also after it was lost."""
    request_timeout_s: float = Field(default=3600.0, gt=0)
    """Time limit for one request, including the replacement of a lost server."""
    update_timeout_s: float = Field(default=900.0, gt=0)
    """Time limit for one step of a weight update."""
    retries: int = Field(default=4, ge=0)
    """The most times that a request is sent again after its server was lost."""
    restart: bool = True
    """Replace a launched server that ended."""
    in_flight: Literal["continue", "abort"] = "continue"
    """Requests in flight when weights change: they continue under the new weights, from the tokens that they have, or
    end as they are with ``stop_reason = "abort"``."""

    @field_validator("extra_args")
    @classmethod
    def _without_fields(cls, arguments: tuple[str, ...]) -> tuple[str, ...]:
        names = [part.partition("=")[0].replace("_", "-") for part in arguments if part.startswith("--")]
        taken = [
            field for field in HAVE_FIELDS if any(len(name) > 2 and field.startswith(name) for name in names)
        ]
        if taken:
            raise ValueError(
                f"set {', '.join(HAVE_FIELDS[field] for field in taken)} instead of {', '.join(taken)}"
            )
        return arguments

    @model_validator(mode="after")
    def _protected(self) -> Self:
        if self.api_key is None and not _is_loopback(self.host):
            raise ValueError(
                f"host = {self.host!r} without api_key: whoever reaches a server can run code on it, since it "
                "unpickles the tensors of weight updates; set api_key to '${env:NAME}', or host to 127.0.0.1"
            )
        return self

    @property
    def key(self) -> str | None:
        """The value of ``api_key``; raises `ConfigError` where its variable is not set."""
        return None if self.api_key is None else self.api_key.read()


class SglangConfig(InferenceEngineConfig):
    """The common config and SGLang's own section.

    ``layout.dp`` is the number of servers, and ``layout.tp`` that of the ranks of each.
    """

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

    def of_server(self, number: int) -> SglangConfig:
        """The config of server ``number``, with the devices of its ranks alone.

        Raises `ConfigError` where SGLang cannot name them: it takes those at equal distances.
        """
        ranks = self.layout.tp
        devices = self.devices or tuple(range((number + 1) * ranks))
        return self.with_devices(number, devices[number * ranks : (number + 1) * ranks])

    def with_devices(self, number: int, own: tuple[int, ...]) -> SglangConfig:
        """The config of server ``number``, whose ranks are on the devices ``own``; raises as `of_server` does."""
        steps = {second - first for first, second in pairwise(own)}
        if len(own) < self.layout.tp or len(steps) > 1 or min(steps, default=1) < 1:
            raise ConfigError(
                f"devices = {list(self.devices)}: server {number} gets {list(own)} for {self.layout.tp} ranks; SGLang "
                "takes devices that rise in equal steps, such as [2, 3]"
            )
        return self.model_copy(update={"devices": own})

    def on_machine(self, number: int, own: tuple[int, ...], host: str) -> SglangConfig:
        """As `with_devices`, for a server on the machine that others reach at ``host``. Needs ``options.api_key``."""
        if self.options.api_key is None:
            raise ConfigError(
                f"a server on {host} without options.api_key: whoever reaches a server can run code on it, since it "
                "unpickles the tensors of weight updates; set options.api_key to '${env:NAME}'"
            )
        options = self.options.model_copy(update={"host": host})
        return self.with_devices(number, own).model_copy(update={"options": options})

    @property
    def server_python(self) -> str:
        """The Python that runs servers."""
        return self.options.python or os.environ.get(PYTHON_VARIABLE) or sys.executable
