"""Options that engines over servers share."""

from __future__ import annotations

import ipaddress
import os
import re
import sys
from collections.abc import Mapping
from typing import ClassVar, Literal, Self, TypeAlias

from pydantic import Field, field_validator, model_validator

from core_rl.config.base import Config
from core_rl.config.engine import InferenceEngineConfig
from core_rl.config.paths import LocalPath, ProgramPath
from core_rl.config.secret import SecretReference
from core_rl.errors import ConfigError

__all__ = ["Interrupt", "ServerEngineConfig", "ServerOptions", "is_loopback", "server_address"]

Interrupt: TypeAlias = Literal["continue", "abort"]
"""Effect of a pause on requests in flight: they wait and continue, or end as they are."""


ADDRESS = re.compile(r"(?:http://)?((?:\[[0-9A-Fa-f:.]+\]|[^\s\[\]:/@?#]+):(\d{1,5}))/?")


def server_address(text: str) -> str:
    """The ``host:port`` of ``text``, which may be ``http://host:port``; raises `ConfigError` for anything else."""
    match = ADDRESS.fullmatch(text)
    if match is None or not 0 < int(match[2]) < 2**16:
        shown = re.sub("[^/]*@", "...@", text)  # without a password
        raise ConfigError(
            f"{shown!r} is not host:port; leave path and user out, servers are called over plain http"
        )
    return match[1]


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches ``host``."""
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


class ServerOptions(Config):
    """Addresses, launching and time limits of the servers of an engine."""

    flags: ClassVar[Mapping[str, str]] = {}
    """Arguments of a server's command line that ``extra_args`` may not have, and the field for each."""

    addresses: tuple[str, ...] = ()
    """Servers that others started, as ``host:port`` or ``http://host:port``. They only draw and score, and have to
    serve ``model.path``, unless ``take_over`` is set. Without any, the engine launches ``layout.dp`` servers."""
    take_over: bool = False
    """Pause, label and load weights into servers at ``addresses``, also where another run does. Training needs it."""
    python: ProgramPath | None = None
    """The Python of the environment that the servers are installed in. By default the engine's environment
    variable names it (docs/install.md), and else the Python of this process."""
    host: str = "127.0.0.1"
    """The address that launched servers listen on. Another one than the loopback needs ``api_key``: whoever reaches a
    server without a key can run code on it."""
    ports: tuple[int, ...] = ()
    """The ports of launched servers; by default any free ones."""
    api_key: SecretReference | None = None
    """The key that launched and running servers require of clients: ``${env:NAME}`` with the name
    of the environment variable that holds it, never the key itself."""
    memory_fraction: float | None = Field(default=None, gt=0.0, lt=1.0)
    """The part of an accelerator's memory that a launched server takes for weights and cache; by default the server
    decides, as if it were the only user. Needed where an engine that trains is on the same accelerator."""
    max_running_requests: int | None = Field(default=None, ge=1)
    """Requests that one launched server computes at one time; by default the server decides."""
    extra_args: tuple[str, ...] = ()
    """Further arguments of a launched server's command line; arguments with a field are refused."""
    log_path: LocalPath | None = None
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
    """Replace a launched server that ended, or hangs: it exceeded a time limit, and responds to nothing."""
    in_flight: Interrupt = "continue"
    """Requests in flight when weights change: they continue under the new weights, from the tokens that they have, or
    end as they are with ``stop_reason = "abort"``."""

    @field_validator("extra_args")
    @classmethod
    def _without_fields(cls, arguments: tuple[str, ...]) -> tuple[str, ...]:
        names = [part.partition("=")[0].replace("_", "-") for part in arguments if part.startswith("--")]
        taken = [flag for flag in cls.flags if any(len(name) > 2 and flag.startswith(name) for name in names)]
        if taken:
            raise ValueError(
                f"set {', '.join(cls.flags[flag] for flag in taken)} instead of {', '.join(taken)}"
            )
        return arguments

    @field_validator("addresses")
    @classmethod
    def _host_and_port(cls, addresses: tuple[str, ...]) -> tuple[str, ...]:
        try:
            return tuple(map(server_address, addresses))
        except ConfigError as error:
            raise ValueError(str(error)) from error

    @model_validator(mode="after")
    def _protected(self) -> Self:
        if problem := self.exposure(self.host):
            raise ValueError(problem)
        return self

    def exposure(self, host: str) -> str | None:
        """Reason why a server may not listen on ``host``."""
        if self.api_key is None and not is_loopback(host):
            return (
                f"host = {host!r} without api_key: whoever reaches a server can run code on it; set api_key to "
                "'${env:NAME}', or host to 127.0.0.1"
            )
        return None

    @property
    def key(self) -> str | None:
        """The value of ``api_key``; raises `ConfigError` where its variable is not set."""
        return None if self.api_key is None else self.api_key.read()


class ServerEngineConfig(InferenceEngineConfig):
    """The common config, and the section of an engine over servers.

    ``layout.dp`` is the number of servers, and ``layout.tp`` that of the ranks of each.
    """

    product: ClassVar[str]
    """The name of such servers in messages."""
    module: ClassVar[str]
    """A module of the Python that runs them."""
    python_variable: ClassVar[str]
    """The environment variable that may name this Python."""

    options: ServerOptions = ServerOptions()

    @property
    def server_python(self) -> str:
        """The Python that runs servers."""
        return self.options.python or os.environ.get(self.python_variable) or sys.executable

    def of_server(self, number: int) -> Self:
        """The config of server ``number``, with the devices of its ranks alone and a seed of its own.

        Raises `ConfigError`.
        """
        ranks = self.layout.tp
        devices = self.devices or tuple(range((number + 1) * ranks))
        return self.with_devices(number, devices[number * ranks : (number + 1) * ranks])

    def with_devices(self, number: int, devices: tuple[int, ...]) -> Self:
        """The config of server ``number``, whose ranks are on ``devices``; raises `ConfigError` where they are few."""
        if len(devices) < self.layout.tp:
            raise ConfigError(
                f"devices = {list(self.devices)}: server {number} gets {list(devices)} for {self.layout.tp} ranks; "
                "name as many devices as there are ranks of all servers"
            )
        # With one seed, two servers would draw the same tokens for one prompt.
        return self.model_copy(update={"devices": devices, "seed": self.seed + number})

    def on_machine(self, number: int, devices: tuple[int, ...], host: str) -> Self:
        """As `with_devices`, for a server on the machine that others reach at ``host``.

        Raises `ConfigError` where ``options`` do not protect a server there.
        """
        if problem := self.options.exposure(host):
            raise ConfigError(f"options: {problem}")
        options = self.options.model_copy(update={"host": host})
        return self.with_devices(number, devices).model_copy(update={"options": options})

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
